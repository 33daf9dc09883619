"""What the conformance suite does not cover of `TorchAdapter`: hooks, refusals, the scaler's skipped steps."""

import copy
import logging
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from cpsr.engines import TorchAdapter
from cpsr.errors import UnsupportedEngineError
from cpsr.qualify.conformance import BEFORE, Recorder, run, seed
from cpsr.qualify.torch_jobs import TinyLM, optimizer_of, token_batch
from cpsr.state.codec import SmallState
from tests.device import DEVICE, cpu_only
from tests.engines.torch_cases import TinyConvNet, build, image_batch
from tests.stand_in_device import stand_in_device


def batch_of(*which: int) -> tuple[torch.Tensor, ...]:
    return tuple(one.to(DEVICE) for one in token_batch(*which))


def test_scaler_counts_skipped_steps_and_backs_off() -> None:
    seed(1)
    job, recorder = build("fp32", "adamw", "cosine", scaler=True), Recorder()
    job.adapter.attach(recorder)
    run(job, 0, BEFORE)
    assert recorder.steps() == [(1, True), (2, False), (3, True)]
    assert [event[0] for event in recorder.events] == ["before_update", "after_step"] * BEFORE
    assert job.adapter.scalars()["grad_scaler"]["scale"] == 128.0
    assert job.adapter.scalars()["optimizer_steps"][0]["step"] == 2.0


@cpu_only("the stand-in holds host memory")
def test_numbers_of_a_device_are_left_there_and_are_the_same() -> None:
    """As fused and capturable optimizers keep them, with a learning rate that is a tensor."""
    seed(1)
    job = build("fp32", "adamw", "cosine", scaler=True)
    job.adapter.attach(Recorder())
    run(job, 0, BEFORE)
    expected = job.adapter.scalars()
    rate = torch.tensor(job.optimizer.param_groups[0]["lr"], dtype=torch.float64)
    with stand_in_device() as device:
        device.at_once = False
        for state in job.optimizer.state.values():
            state["step"] = device.tensor(state["step"])
        scaler = job.scaler
        assert scaler is not None
        assert scaler._scale is not None
        assert scaler._growth_tracker is not None
        scaler._scale, scaler._growth_tracker = device.tensor(scaler._scale), device.tensor(scaler._growth_tracker)
        job.optimizer.param_groups[0]["lr"] = device.tensor(rate)
        state = SmallState(job.adapter.scalars(on_device=True))
        assert device.calls("synchronize") == []
        state.wait()
        found = state.tree()
        assert found["param_groups"][0].pop("lr") == rate
        assert expected["param_groups"][0].pop("lr") == rate
        assert found == expected
        assert job.adapter.scalars()["optimizer_steps"] == expected["optimizer_steps"]


def test_forgotten_scheduler_step_is_refused() -> None:
    job = build("fp32", "adamw", "cosine")
    job.adapter.attach(Recorder())
    scheduler, job.scheduler = job.scheduler, None
    job.train_step(0)
    with pytest.raises(UnsupportedEngineError, match=r"CosineAnnealingLR\.step\(\) was not called in step 1"):
        job.train_step(1)
    assert scheduler is not None


@pytest.mark.parametrize("overflows", [False, True])
def test_the_state_changes_only_once_the_scaler_knows_the_gradients(
    overflows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU it waits for them there, behind what other ranks owe: until then a dump must be possible."""
    job, recorder = build("fp32", "adamw", "none", scaler=True), Recorder()
    assert job.scaler is not None
    order: list[str] = []
    for owner, name in (
        (recorder, "before_update"),
        (recorder, "state_changes"),
        (recorder, "after_step"),
        (job.scaler, "_maybe_opt_step"),
        (job.scaler, "update"),
    ):
        original = getattr(owner, name)

        def noted(*given: Any, _name: str = name, _original: Any = original) -> Any:
            order.append(_name)
            return _original(*given)

        monkeypatch.setattr(owner, name, noted)
    job.adapter.attach(recorder)
    loss = job.called(*batch_of(0, 0, 0))
    job.scaler.scale(loss * (1e38 if overflows else 1.0)).backward()
    job.scaler.step(job.optimizer)
    job.scaler.update()
    assert recorder.steps() == [(1, not overflows)]
    asked = ["before_update", "_maybe_opt_step"]
    changed = ["state_changes", "update"]
    assert order == [*asked, *changed, "after_step"]


def test_a_step_that_a_fused_optimizer_skips_is_not_applied() -> None:
    """It is always called, and looks itself whether the gradients overflow."""
    job, recorder = build("fp32", "adamw", "none", scaler=True), Recorder()
    assert job.scaler is not None
    parameters = list(job.module.parameters())
    fused = torch.optim.AdamW(parameters, fused=True)
    adapter = TorchAdapter(job.module, fused, None, job.scaler)
    adapter.attach(recorder)
    for factor in (1.0, 1e38, 1.0):
        fused.zero_grad()
        before = [parameter.detach().clone() for parameter in parameters]
        job.scaler.scale(job.module(*batch_of(0, 0, 0)) * factor).backward()
        job.scaler.step(fused)
        job.scaler.update()
        changed = any(not torch.equal(*pair) for pair in zip(parameters, before, strict=True))
        assert recorder.steps()[-1][1] == changed or DEVICE == "cuda"  # the GPU's answer is not waited for
    assert recorder.steps() == [(1, True), (2, DEVICE == "cuda"), (3, True)]


def test_a_schedule_that_steps_before_the_scaler_is_a_change_of_the_state() -> None:
    """Else a dump in a step that the scaler skips would hold the schedule of the next one."""
    job, recorder = build("fp32", "adamw", "cosine", scaler=True), Recorder()
    assert job.scaler is not None
    epochs: list[int] = []
    recorder.at_change = lambda: epochs.append(job.scheduler.last_epoch)
    job.adapter.attach(recorder)
    for factor in (1.0, 1e38, 1.0):
        job.optimizer.zero_grad()
        job.scaler.scale(job.module(*batch_of(0, 0, 0)) * factor).backward()
        job.scaler.step(job.optimizer)
        job.scheduler.step()
        job.scaler.update()
    assert recorder.steps() == [(1, True), (2, False), (3, True)]
    assert epochs == [0, 1, 2]


def test_detach_restores_everything() -> None:
    job = build("fp32", "adamw", "cosine", scaler=True)
    parts = (job.module, job.optimizer, job.scheduler, job.scaler)

    def appearance() -> list[Any]:
        hooks = [len(job.module._forward_hooks), len(job.module._forward_pre_hooks)]
        hooks += [len(job.optimizer._optimizer_step_pre_hooks), len(job.optimizer._optimizer_step_post_hooks)]
        return [*hooks, *(sorted(vars(part)) for part in parts), *(type(part) for part in parts)]

    before = appearance()
    state_keys = job.scheduler.state_dict().keys()
    job.adapter.attach(Recorder())
    assert job.scheduler.state_dict().keys() == state_keys
    assert isinstance(job.scheduler, torch.optim.lr_scheduler.CosineAnnealingLR)
    job.adapter.detach()
    assert appearance() == before
    job.adapter.detach()


def test_inputs_and_losses_of_training_only() -> None:
    job, recorder = build("fp32", "adamw", "none", micro_batches=2), Recorder()
    job.adapter.attach(recorder)
    with torch.no_grad():
        job.module(*batch_of(9, 0, 0))
    job.module.eval()
    job.module(*batch_of(9, 0, 0))
    job.module.train()
    assert recorder.losses == []
    assert not job.adapter.can_evaluate
    job.train_step(0)
    assert len(recorder.losses) == 2
    assert recorder.inputs is not None
    assert torch.equal(recorder.inputs[0][0], batch_of(0, 1, 0)[0])


def test_submodules_kept_in_evaluation_mode_stay_there() -> None:
    job = build("conv", "sgd", "none")
    assert isinstance(job.module, TinyConvNet)
    norm = job.module.layers[1]
    norm.eval()
    with job.adapter.evaluation():
        assert not job.module.training
        job.adapter.evaluate(tuple(one.to(DEVICE) for one in image_batch(0, 0, 0)), {})
    assert job.module.training
    assert not norm.training


def test_buffers_written_while_evaluated_are_put_back() -> None:
    job = build("fp32", "sgd", "none")
    assert isinstance(job.module, TinyLM)
    buffer = job.module.drift
    with job.adapter.evaluation():
        buffer.add_(1.0)
        job.module.drift = torch.ones(7)
    assert job.module.drift is buffer
    assert not buffer.any()


class TestRefusals:
    def test_a_step_in_a_cuda_graph(self, monkeypatch: pytest.MonkeyPatch) -> None:
        job, recorder = build("fp32", "adamw", "none"), Recorder()
        job.adapter.attach(recorder)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(UnsupportedEngineError, match=r"AdamW\.step\(\) is being captured.*CUDA graph"):
            job.train_step(0)
        assert recorder.inputs is None  # a capture runs nothing
        assert not recorder.losses

    def test_closure(self) -> None:
        job = build("fp32", "sgd", "none")
        job.adapter.attach(Recorder())
        with pytest.raises(UnsupportedEngineError, match=r"SGD\.step was called with a closure"):
            job.optimizer.step(lambda: 0.0)

    def test_overlapping_parameters(self) -> None:
        module = nn.Module()
        storage = torch.randn(10)
        module.one, module.two = nn.Parameter(storage[:6]), nn.Parameter(storage[4:])
        with pytest.raises(UnsupportedEngineError, match="one and two are different tensors in the same memory"):
            TorchAdapter(module, torch.optim.AdamW(module.parameters()))

    def test_strided_parameter(self) -> None:
        module = nn.Module()
        module.weight = nn.Parameter(torch.randn(4, 4)[:, ::2])
        with pytest.raises(UnsupportedEngineError, match="weight of shape"):
            TorchAdapter(module, torch.optim.AdamW(module.parameters()))

    def test_parameter_outside_the_module(self) -> None:
        module, stray = nn.Linear(2, 2), nn.Parameter(torch.zeros(5))
        with pytest.raises(UnsupportedEngineError, match=r"shape \(5,\) that is not in Linear"):
            TorchAdapter(module, torch.optim.AdamW([*module.parameters(), stray]))

    def test_expanded_buffer(self) -> None:
        module = nn.Linear(2, 2)
        module.register_buffer("wide", torch.zeros(1).expand(4))
        with pytest.raises(UnsupportedEngineError, match="buffer wide"):
            TorchAdapter(module, torch.optim.AdamW(module.parameters())).shard()

    def test_parts_that_were_not_saved(self) -> None:
        saved = build("fp32", "adamw", "cosine").adapter.scalars()
        with pytest.raises(UnsupportedEngineError, match="had 1 learning-rate schedulers and this one has 0"):
            build("fp32", "adamw", "none").adapter.load_scalars(saved)
        scaled = build("fp32", "adamw", "cosine", scaler=True).adapter.scalars()
        with pytest.raises(UnsupportedEngineError, match="had a grad_scaler and this one has none"):
            build("fp32", "adamw", "cosine").adapter.load_scalars(scaled)
        with pytest.raises(UnsupportedEngineError, match="the state is of AdamW, and the optimizer is SGD now"):
            build("fp32", "sgd", "cosine").adapter.load_scalars(saved)


def test_plateau_schedule_is_left_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    module = TinyLM()
    optimizer = optimizer_of("sgd", module)
    adapter = TorchAdapter(module, optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))
    adapter.attach(Recorder())
    before = adapter.scalars()["schedule"]
    with caplog.at_level(logging.WARNING):
        assert adapter.skip_ahead(3) == [0.1, 0.1, 0.1]
    assert adapter.scalars()["schedule"] == before
    assert [record.message.split()[0] for record in caplog.records] == ["ReduceLROnPlateau"]


def test_a_copy_of_what_is_watched_is_not_watched() -> None:
    """As a loop makes it for an average of its weights."""
    seed(1)
    job, recorder = build("fp32", "adamw", "cosine"), Recorder()
    job.adapter.attach(recorder)
    run(job, 0, 1)
    assert job.scheduler is not None
    rates = job.scheduler.get_last_lr()
    copies = [copy.deepcopy(job.called), pickle.loads(pickle.dumps(job.called))]
    schedules = [copy.deepcopy(job.scheduler), pickle.loads(pickle.dumps(job.scheduler))]
    recorder.events.clear()
    for one in copies:
        one(*batch_of(0, 0, 0))
    for schedule in schedules:
        assert type(schedule) is torch.optim.lr_scheduler.CosineAnnealingLR
        schedule.step()
    assert recorder.events == []
    assert job.scheduler.get_last_lr() == rates
    run(job, 1, 1)
    assert recorder.steps() == [(2, True)]
    job.adapter.detach()
    assert not job.called._forward_pre_hooks
    assert not job.called._forward_hooks
