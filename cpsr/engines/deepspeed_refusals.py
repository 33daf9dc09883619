"""Why a DeepSpeed feature is refused, by its key in the configuration, and the nearest thing that works."""

__all__ = ["refusal"]

_OTHERS = "its state is out of sight, or was not tested to be restored bit for bit; remove it from the configuration"
_QUANTISED = "it was not tested to be restored bit for bit, and has no kernel for processors; set it to false"
_REASONS = {
    "zero_optimization.zenflow": (
        "it updates chosen gradients beside the training, from buffers that no checkpoint has; use ZeRO 2 without it"
    ),
    "zero_optimization.offload_optimizer.super_offload": (
        "its optimizer runs in processes of its own, which CPSR cannot read; use ZeRO 3 without it"
    ),
    "zero_optimization.zero_hpz_partition_size": (
        "it keeps a second copy of the weights on each node, which a restart would not write, also in engines that the "
        "process builds later; set it to 1 in all of them"
    ),
    "zero_optimization.zero_quantized_weights": _QUANTISED,
    "zero_optimization.zero_quantized_nontrainable_weights": _QUANTISED,
    "zero_optimization.zero_quantized_gradients": f"{_QUANTISED}, and choose a communication_data_type",
    "compile.deepcompile": (
        "it runs on CUDA alone, where it replaces the hooks of ZeRO, and was not tested; set it to false: "
        "engine.compile() then compiles the module with torch.compile, at ZeRO 0 to 3"
    ),
    "data_efficiency.data_routing.random_ltd": (
        "its schedule and the tokens that it drops are not in a checkpoint; set it to enabled: false"
    ),
}


def refusal(names: list[str]) -> str:
    """What is used and refused, each with its reason."""
    return "DeepSpeed configuration uses " + "; and ".join(f"{name}: {_REASONS.get(name, _OTHERS)}" for name in names)
