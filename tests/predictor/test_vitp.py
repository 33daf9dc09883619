import json
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy
import pytest
import torch

from cpsr.predictor import protocol
from cpsr.predictor.guard import measure
from cpsr.predictor.line import LinePredictor
from cpsr.predictor.network import DIMENSION, pretrained_parameters
from cpsr.predictor.protocol import Forecast, History, Target
from cpsr.predictor.training import Head
from cpsr.predictor.vitp import VITPPredictor, host_memory_bytes, without_slices
from cpsr.state import codec


class Other(protocol.Ranks):
    """A rank that does not train the network."""

    trains = False


MakeHistory = Callable[..., Any]
Steps = list[dict[str, torch.Tensor]]
INTERVAL = 50
SPAN = 9  # checkpoints that the history holds: 400 iterations
LINE: dict[str, Any] = {"window_iterations": 300, "gain": 1.0}
OPERATORS = tuple(f"layer.{place}.weight" for place in range(8))
SIZE = 200


def circle(operator: int, place: float) -> torch.Tensor:
    """A slow motion that turns by 0.25 in an interval, in a plane of its own."""
    plane = torch.randn(2, SIZE, generator=torch.Generator().manual_seed(operator), dtype=torch.float64)
    angle = 0.25 * place + operator
    return math.cos(angle) * plane[0] + math.sin(angle) * plane[1]


def straight(operator: int, place: float) -> torch.Tensor:
    direction = torch.randn(SIZE, generator=torch.Generator().manual_seed(operator), dtype=torch.float64)
    return 0.25 * place * direction


def noisy(motion: Callable[[int, float], torch.Tensor], count: int, noise: float = 0.1) -> Steps:
    generator = torch.Generator().manual_seed(7)
    return [
        {
            name: (motion(k, place) + noise * torch.randn(SIZE, generator=generator, dtype=torch.float64)).float()
            for k, name in enumerate(OPERATORS)
        }
        for place in range(count)
    ]


def until(make_history: MakeHistory, steps: Steps, count: int) -> Any:
    """The newest checkpoints after `count` of them, at iterations 0, 50, ..."""
    begin = max(0, count - SPAN)
    return make_history([INTERVAL * place for place in range(begin, count)], steps[begin:count])


def teach(predictor: VITPPredictor, make_history: MakeHistory, steps: Steps, first: int = 1) -> VITPPredictor:
    for count in range(first, len(steps) + 1):
        for _ in predictor.learn(until(make_history, steps, count)):
            pass
    return predictor


def ahead(history: Any, iterations: int = 40) -> Target:
    newest = history.entries[-1]
    return Target(newest.iteration + iterations, newest.time + iterations, 1.0)


def predicted(predictor: LinePredictor, history: History, forecast: Forecast) -> dict[str, torch.Tensor]:
    out = {operator: torch.full((history.numel(operator),), math.nan) for operator in history.operators}
    for operator, start, values in predictor.predict(history, forecast):
        out[operator][start : start + values.numel()] = values
    return out


def true_cosine(
    predictor: LinePredictor, make_history: MakeHistory, steps: Steps, motion: Callable[[int, float], torch.Tensor]
) -> float:
    """Of the predicted displacement with that of the motion without its noise, mean over the operators."""
    history = until(make_history, steps, len(steps))
    out = predicted(predictor, history, predictor.forecast(history, ahead(history)))
    newest = len(steps) - 1
    found = [
        torch.cosine_similarity(
            out[name].double() - steps[-1][name].double(), motion(k, newest + 0.8) - motion(k, newest), dim=0
        )
        for k, name in enumerate(OPERATORS)
    ]
    return float(torch.stack(found).mean())


def test_where_the_direction_bends_it_beats_the_line(make_history: MakeHistory) -> None:
    steps = noisy(circle, 22)
    predictor = VITPPredictor(**LINE, direction="vitp")
    line, vitp = [], []
    for count in range(18, 23):
        predictor = teach(predictor, make_history, steps[: count - 1], first=1 if count == 18 else count - 1)
        # The checkpoint that is predicted from has not been learned yet, nor anything after it.
        line.append(true_cosine(LinePredictor(**LINE), make_history, steps[:count], circle))
        vitp.append(true_cosine(predictor, make_history, steps[:count], circle))
    assert max(line) < 0.75
    assert min(vitp) > max(line) + 0.1
    late = predictor.accuracy()[-5:]
    assert [(one["iteration"], one["checkpoints"]) for one in late] == [(50 * k, k + 1) for k in range(16, 21)]
    by_the_line = teach(VITPPredictor(**LINE, direction="line"), make_history, steps[:21]).accuracy()[-5:]
    for turned, straight_on in zip(late, by_the_line, strict=True):
        assert turned["horizon_iterations"] == straight_on["horizon_iterations"] == 100
        assert turned["mean_square_error"] < straight_on["mean_square_error"]


def test_a_backtest_is_off_by_what_the_weights_say(make_history: MakeHistory) -> None:
    """From products alone it finds the error that predicted and true weights have."""
    steps = noisy(circle, 14)
    found = teach(VITPPredictor(direction="line"), make_history, steps).accuracy()[-1]
    seen = until(make_history, steps, 12)
    predictor = LinePredictor(gain=1.0)
    target = Target(650, seen.entries[-1].time + 100, 1.0)
    out = predicted(predictor, seen, predictor.forecast(seen, target))
    errors = torch.cat([out[name].double() - steps[13][name].double() for name in OPERATORS])
    assert (found["iteration"], found["horizon_iterations"]) == (650, 100)
    assert found["mean_square_error"] == pytest.approx(float(errors.square().mean()), rel=1e-4)


def test_where_nothing_bends_it_is_no_worse_than_the_line(make_history: MakeHistory) -> None:
    steps = noisy(straight, 18, noise=0.5)
    predictor = teach(VITPPredictor(**LINE, direction="vitp"), make_history, steps[:-1])
    line = true_cosine(LinePredictor(**LINE), make_history, steps, straight)
    assert line < 0.99  # there is noise to be misled by
    assert true_cosine(predictor, make_history, steps, straight) > line - 0.01


@pytest.fixture(scope="module")
def taught(make_history: MakeHistory) -> dict[str, Any]:
    """What a predictor knows after 16 checkpoints that bend."""
    return teach(VITPPredictor(**LINE, direction="vitp"), make_history, noisy(circle, 16)).state_dict()


def loaded(state: dict[str, Any], **options: Any) -> VITPPredictor:
    predictor = VITPPredictor(**{**LINE, "direction": "vitp", **options})
    predictor.load_state_dict(state)
    return predictor


def test_untrained_it_is_exactly_the_line(make_history: MakeHistory) -> None:
    history = until(make_history, noisy(circle, 12), 12)
    expected = LinePredictor(**LINE).forecast(history, ahead(history))
    predictor = VITPPredictor(**LINE, direction="vitp")
    pretrained = predictor.forecast(history, ahead(history))
    state, parameters = predictor.state_dict(), pretrained_parameters()
    untrained = Head.of(torch.cat([parameters[:-DIMENSION], torch.zeros(DIMENSION)]))
    predictor.load_state_dict({**state, "vitp": {**state["vitp"], "head": vars(untrained)}})
    found = predictor.forecast(history, ahead(history))
    assert found.coefficients == expected.coefficients
    assert found.settings["direction"] == pretrained.settings["direction"] == "vitp"
    assert pretrained.coefficients != expected.coefficients


def test_operators_that_cannot_be_turned_keep_the_line_and_are_named(
    make_history: MakeHistory, taught: dict[str, Any]
) -> None:
    steps = [{"still": torch.full((3,), 0.1), **step} for step in noisy(circle, 16)]
    history = until(make_history, steps, 16)
    forecast = loaded(taught).forecast(history, ahead(history))
    line = LinePredictor(**LINE).forecast(history, ahead(history))
    assert forecast.settings["line_operators"] == 1
    assert forecast.coefficients["still"] == line.coefficients["still"]
    assert torch.equal(predicted(loaded(taught), history, forecast)["still"], torch.full((3,), 0.1))


def same(first: Any, second: Any) -> bool:
    """Equal as trees of plain data and tensors, to the last bit."""
    trees = [codec.encode(tree) for tree in (first, second)]
    tensors = [tree[1] for tree in trees]
    return trees[0][0] == trees[1][0] and all(torch.equal(tensors[0][key], tensors[1][key]) for key in tensors[0])


@pytest.mark.parametrize("slices", [0, 2])
def test_what_is_abandoned_counts_as_not_seen(make_history: MakeHistory, taught: dict[str, Any], slices: int) -> None:
    steps = noisy(circle, 17)
    predictor = loaded(taught)
    work = predictor.learn(until(make_history, steps, 17))
    for _ in range(slices):
        next(work)
    assert same(predictor.state_dict(), taught)
    work.close()  # type: ignore[attr-defined]  # learn is a generator
    straight_on = loaded(taught)
    for one in (predictor, straight_on):
        for _ in one.learn(until(make_history, steps, 17)):
            pass
    assert not same(predictor.state_dict(), taught)
    assert same(predictor.state_dict(), straight_on.state_dict())


def test_nothing_is_taken_on_the_device_that_the_training_loop_works_on(
    make_history: MakeHistory, taught: dict[str, Any]
) -> None:
    history = until(make_history, noisy(circle, 17), 17)

    def found() -> dict[str, torch.Tensor]:
        predictor = loaded(taught)
        for _ in predictor.learn(history):
            pass
        forecast = predictor.forecast(history, ahead(history))
        measure(history, forecast, predictor.predict(history, forecast))
        return {operator: values for operator, _, values in predictor.predict(history, forecast)}

    expected = found()
    with torch.device("meta"):  # where any tensor that is made without naming its device would have no values
        moved = found()
    assert all(torch.equal(moved[operator], values) for operator, values in expected.items())


def test_a_rank_that_does_not_train_keeps_statistics_alone(make_history: MakeHistory) -> None:
    predictor = VITPPredictor(**LINE)
    predictor.ranks = Other()
    teach(predictor, make_history, noisy(circle, 9))
    state = predictor.state_dict()["vitp"]
    assert (state["head"], state["accuracy"]) == (None, [])
    assert len(state["statistics"]["operators"]) == len(OPERATORS)


def test_learning_leaves_the_training_loop_alone(make_history: MakeHistory, taught: dict[str, Any]) -> None:
    steps = noisy(circle, 17)
    expected, predictor = loaded(taught), loaded(taught)
    for _ in expected.learn(until(make_history, steps, 17)):
        pass
    torch_state, numpy_state, threads = torch.get_rng_state(), repr(numpy.random.get_state()), torch.get_num_threads()
    with torch.inference_mode():
        grad = torch.is_grad_enabled()
        for _ in predictor.learn(until(make_history, steps, 17)):
            assert torch.is_grad_enabled() == grad
        forecast = predictor.forecast(history := until(make_history, steps, 17), ahead(history))
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert repr(numpy.random.get_state()) == numpy_state
    assert torch.get_num_threads() == threads
    assert forecast.coefficients == expected.forecast(history, ahead(history)).coefficients


def test_it_goes_on_from_what_was_saved(make_history: MakeHistory, taught: dict[str, Any]) -> None:
    data, tensors = codec.encode(taught)
    restored = codec.decode(json.loads(json.dumps(data)), tensors)
    steps = noisy(circle, 18)
    straight_on = teach(VITPPredictor(**LINE, direction="vitp"), make_history, steps)
    again = teach(loaded(restored), make_history, steps, first=17)
    assert same(again.state_dict(), straight_on.state_dict())


def counted(predictor: VITPPredictor) -> int:
    found: int = predictor.state_dict()["vitp"]["checkpoints"]
    return found


def test_a_rank_with_other_slices_goes_on_without_the_products_of_the_old_ones(
    make_history: MakeHistory, taught: dict[str, Any]
) -> None:
    """As after a change of the number of ranks, here of one that owns every operator before and after."""
    steps = noisy(circle, 18)
    straight_on = teach(loaded(taught), make_history, steps, first=17)
    moved = without_slices(taught)
    assert moved["vitp"]["statistics"]["operators"] == {}
    assert taught["vitp"]["statistics"]["operators"]
    predictor = loaded(moved)
    predictor = teach(predictor, make_history, steps[:16], first=16)  # the history as far as the old ranks saved it
    assert counted(predictor) == taught["vitp"]["checkpoints"]
    found = teach(predictor, make_history, steps, first=17)
    assert counted(found) == counted(straight_on)
    history = until(make_history, steps, 18)
    for name, row in straight_on.forecast(history, ahead(history)).coefficients.items():
        assert found.forecast(history, ahead(history)).coefficients[name] == pytest.approx(row, abs=1e-2)


class Ranks:
    """Two ranks in threads: what each passes in is exchanged at a barrier, as a collective does."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2, timeout=20)
        self._given: list[Any] = [None, None]
        self.calls = [0, 0]

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self.calls[rank] += 1
        self._given[rank] = value
        self._barrier.wait()
        everything = list(self._given)
        self._barrier.wait()
        return everything

    @staticmethod
    def together(work: Sequence[Callable[[], Forecast]]) -> list[Forecast]:
        results: dict[int, Forecast] = {}

        def run(rank: int) -> None:
            results[rank] = work[rank]()

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(work))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return [results[rank] for rank in range(len(work))]


class OneOfTwo(protocol.Ranks):
    """The collectives of one of them."""

    def __init__(self, both: Ranks, rank: int) -> None:
        self.trains = rank == 0
        self._both, self._rank = both, rank

    def reduce(self, products: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        summed: dict[str, torch.Tensor] = {}
        for part in self._both.exchange(self._rank, products):
            for name, matrix in part.items():
                summed[name] = summed[name] + matrix if name in summed else matrix
        return summed

    def broadcast(self, value: Any) -> Any:
        return self._both.exchange(self._rank, value)[0]


def halves(steps: Steps) -> list[Steps]:
    """Slices as ZeRO makes them: one tensor is all rank 0's, one all rank 1's, the others are cut."""
    cut = dict.fromkeys(OPERATORS, 77) | {OPERATORS[0]: SIZE, OPERATORS[1]: 0}
    parts = [
        [{name: step[name][: cut[name]] for name in OPERATORS if cut[name] > 0} for step in steps],
        [{name: step[name][cut[name] :] for name in OPERATORS if cut[name] < SIZE} for step in steps],
    ]
    assert OPERATORS[1] not in parts[0][0]
    assert OPERATORS[0] not in parts[1][0]
    return parts


def test_ranks_apply_the_same_coefficients_as_one_would(make_history: MakeHistory) -> None:
    steps, ranks = noisy(circle, 16), Ranks()
    parts = halves(steps)
    predictors = [VITPPredictor(**LINE, direction="vitp") for _ in range(2)]
    for rank, predictor in enumerate(predictors):
        predictor.ranks = OneOfTwo(ranks, rank)
        teach(predictor, make_history, parts[rank])
    histories = [until(make_history, part, 16) for part in parts]
    target = ahead(histories[0])
    forecasts = Ranks.together([partial(predictors[rank].forecast, histories[rank], target) for rank in range(2)])
    assert ranks.calls == [4, 4]  # what is known, the path, the weights of the network, and the matrices
    # The unsplit run with rank 0's network.
    whole = teach(VITPPredictor(**LINE, direction="vitp"), make_history, steps)
    state = whole.state_dict()
    state["vitp"]["head"] = predictors[0].state_dict()["vitp"]["head"]
    whole.load_state_dict(state)
    expected = whole.forecast(until(make_history, steps, 16), target)
    line = LinePredictor(**LINE).forecast(until(make_history, steps, 16), target)
    for forecast in forecasts:
        for name, row in forecast.coefficients.items():
            assert row == pytest.approx(expected.coefficients[name], rel=1e-4, abs=1e-5)
            assert row != pytest.approx(line.coefficients[name], rel=1e-2, abs=1e-2)
    shared = OPERATORS[3]
    assert forecasts[0].coefficients[shared] == pytest.approx(forecasts[1].coefficients[shared], rel=1e-5, abs=1e-6)


def test_a_usual_model_stays_far_below_200_megabytes() -> None:
    """What it takes is measured by the benchmark."""
    assert host_memory_bytes(1000, 60, learns=False) < host_memory_bytes(1000, 60, learns=True) < 130_000_000
