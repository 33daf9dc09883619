"""The price of a failure in words, as plans and recoveries state it."""

__all__ = ["exact_price", "predicted_price"]


def exact_price(iterations: float) -> str:
    """Of going back to a checkpoint that many iterations before the failure."""
    count = f"{iterations:.0f}"
    return f"exact: {count} iteration{'' if count == '1' else 's'} later"


def predicted_price(end_cost_iterations: float, deviation_iterations: float) -> str:
    """Of a prediction, for its end cost and the standard deviation of that; below 0 the run ends with a lower loss."""
    spread = f" ± {deviation_iterations:.0f}" if deviation_iterations >= 0.5 else ""
    return f"predicted state; expected cost {end_cost_iterations:z.0f}{spread} iterations"
