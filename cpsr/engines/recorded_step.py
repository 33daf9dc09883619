"""One step of the user's loop: recorded while it runs, and repeated without the loop."""

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any

import torch
from torch.nn.utils import clip_grad
from torch.utils._pytree import tree_flatten
from torch.utils.hooks import RemovableHandle

from cpsr.engines.adapter import EngineAdapter
from cpsr.engines.distributed_tensors import local
from cpsr.engines.evaluation import capture_random_states, restore_random_states
from cpsr.engines.hooks import Hooks
from cpsr.engines.module_attributes import ModuleAttributes
from cpsr.engines.optimizer_state import hyperparameters, load_hyperparameters
from cpsr.engines.reach import Reach
from cpsr.engines.step_inputs import Forward, Inputs, RecordedLoss, autocast_of, copied, enter_autocast
from cpsr.state.codec import same
from cpsr.state.user_objects import GENERATORS, Stateful, stateful

__all__ = ["Evidence", "Fingerprint", "RecordedStep"]

SMALL_BYTES_MAX = 1 << 20  # of the tensors of an object that the user has registered

# A fingerprint of a tensor's bits: equal where these are.
Fingerprint = Callable[[torch.Tensor], Any]


@dataclass
class Evidence:
    """What one execution of a step came to on this rank: fingerprints, by level and name.

    Attributes:
        outputs: what the module returned, and the random states after it.
        gradients: of each parameter, before ranks reduce them; empty where the engine does not show them (FSDP2).
        reduced: of each parameter, as the optimizer used them; empty where the engine has its own (DeepSpeed).
        state: weights, moments and buffers after the step.
    """

    outputs: dict[str, Any] = field(default_factory=dict)
    gradients: dict[str, Any] = field(default_factory=dict)
    reduced: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)


def _harmless(watch: Callable[..., None]) -> Callable[..., None]:
    """The method, whose errors make the step one that is not repeated."""

    @wraps(watch)
    def watched(self: "RecordedStep", *given: Any) -> None:
        if self.recording and self.obstacle is None:
            with self.watching():
                watch(self, *given)

    return watched


class RecordedStep:
    """Records the next step of the loop, and repeats its forward, backward and update.

    What the loop computes between these, as a loss outside of the module, is not repeated: the backward begins with the
    gradients that the loop gave to the module's outputs.

    Args:
        adapter: the engine; the recorder's hooks lie on it from `begin` until `end`.
        fingerprint: of tensors on the adapter's device.
        objects: that the user has registered. A forward may draw from generators among them, or change a small one.

    Attributes:
        recording: whether the loop runs the step.
        obstacle: why this step cannot be repeated, one clause for people; None where it can.
        first: what its execution by the loop came to.
        in_forward: whether the last repetition has begun no backward.
    """

    def __init__(self, adapter: EngineAdapter, fingerprint: Fingerprint, objects: Sequence[Any] = ()) -> None:
        self._adapter, self._fingerprint = adapter, fingerprint
        self._objects = [stateful("an object", one) for one in objects]
        self._generators = [stateful("a generator", one) for one in objects if isinstance(one, GENERATORS)]
        self._saved = list(objects)
        self._reach: Reach | None = None  # what the loop's first forward could reach
        self.obstacle, self.in_forward = adapter.repetition_obstacle(), True
        self.first = self._evidence = Evidence()
        self._forwards: list[Forward] = []
        self._events: list[tuple[str, Any]] = []  # in their order: `forward`, `backward`, and DeepSpeed's `step`
        self._clips: list[tuple[Any, ...]] = []
        self._norm: tuple[float, bool | None] = 2.0, None  # of the last total norm that the loop asked for
        self._groups: list[Any] = []
        self._without_gradient: set[str] | None = None  # parameters that had none when the first backward began
        self._left: dict[str, str] = {}  # what the loop left as gradients, by parameter
        self._hooks, self.recording = Hooks(), True
        self._counted = Counter[str]()
        self._named = {name: one for name, one in adapter.module.named_parameters() if one.requires_grad}

    # While the loop runs the step

    @contextmanager
    def watching(self) -> Iterator[None]:
        """An error inside makes this step one that is not repeated: the loop goes on."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - of the loop's objects, of any kind
            self.obstacle = self.obstacle or f"the step cannot be recorded ({type(error).__name__}: {error})"

    def begin(self) -> None:
        """The loop begins the step."""
        hooks, called = self._hooks, self._adapter.called
        hooks.replace(self._adapter.loop, "recorder", self)
        for name, parameter in self._named.items():
            hooks.add(_hooked(parameter, partial(self._on_gradient, name)))
        if self._adapter.updates_itself:
            hooks.wrap(called, "backward", self._around_backward)
            hooks.wrap(called, "step", self._around_step)
        else:
            hooks.replace(clip_grad, "_clip_grads_with_norm_", self._clipping(clip_grad._clip_grads_with_norm_))
            hooks.replace(clip_grad, "_get_total_norm", self._norming(clip_grad._get_total_norm))

    @_harmless
    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The loop calls the module for training; torch's hook says so."""
        if any(isinstance(one, torch.Tensor) and one.requires_grad for one in tree_flatten((args, kwargs))[0]):
            self.obstacle = "an input of the module requires a gradient, which trains something outside of the module"
        args, kwargs = copied((args, kwargs))  # a loop may overwrite its batch
        reduces = self._adapter.reduces_gradients
        if self._drops_gradients():
            self.obstacle = "the loop drops gradients within a step"
        self._reach = self._reach or Reach(self._adapter.module, self._saved)
        random = self._random_states()
        attributes, autocast = ModuleAttributes(self._adapter.module), autocast_of(self._adapter.device.type)
        self._forwards.append(Forward(args, kwargs, random, attributes, autocast, reduces))
        self._events.append(("forward", len(self._forwards) - 1))

    @_harmless
    def after_forward(self, output: Any) -> None:
        """The module has returned that."""
        index = len(self._forwards) - 1
        self._forwards[index].random_after = self._random_states()
        for number, one in enumerate(self._note_outputs(index, output)):
            if one.requires_grad and not one.is_leaf:
                _hooked(one, partial(self._on_output_gradient, index, number))

    def _note_outputs(self, index: int, output: Any) -> list[torch.Tensor]:
        found = [one for one in tree_flatten(output)[0] if isinstance(one, torch.Tensor)]
        if not found:
            self.obstacle = f"the module returns a {type(output).__name__}, in which torch finds no tensor"
        if any(one.is_leaf and one.requires_grad for one in found):  # a hook on it would stay
            self.obstacle = "the module returns a parameter"
        for number, one in enumerate(found):
            self._evidence.outputs[f"output {number} of forward {index}"] = self._fingerprint(local(one))
        return found

    @_harmless
    def _on_output_gradient(self, index: int, number: int, gradient: torch.Tensor | None) -> None:
        if gradient is None:  # the loss does not depend on this output
            return
        if self._without_gradient is None:
            present = {name: one.grad for name, one in self._named.items() if one.grad is not None}
            self._without_gradient = self._named.keys() - present.keys()
            if not self._adapter.updates_itself and _any(present.values()):
                self.obstacle = "the loop adds to gradients of the step before"
                return
        task = torch._C._current_graph_task_id()
        if not self._events or self._events[-1][0] != "backward" or self._events[-1][1]["task"] != task:
            if any(kind == "backward" and (index, number) in what["outputs"] for kind, what in self._events):
                self.obstacle = "the loop goes backward through a forward more than once"
            self._events.append(("backward", {"task": task, "outputs": []}))
        self._events[-1][1]["outputs"].append((index, number))
        # On the host: held there, a large one does not add to the peak of the device.
        self._forwards[index].gradients[number] = gradient.detach().cpu() if gradient.is_cuda else gradient.detach()

    def _on_gradient(self, name: str, gradient: torch.Tensor | None) -> None:
        if gradient is None or self.obstacle is not None:
            return
        if gradient.layout is not torch.strided:
            self.obstacle = f"the gradient of {name} is sparse"
            return
        self._counted[name] += 1  # micro-batches
        with self.watching():
            self._evidence.gradients[f"{name}, backward {self._counted[name]}"] = self._fingerprint(local(gradient))

    def _drops_gradients(self) -> bool:
        """Whether a parameter has no gradient any more, or zeros, though a backward of this step gave it one."""
        given = [self._named[name].grad for name in self._counted if not self._adapter.updates_itself]
        present = [one for one in given if one is not None]
        return len(present) < len(given) or (bool(given) and not _any(present))

    def _around_backward(self, original: Any, loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(loss, *args, **kwargs)
        if self.recording and self._events and self._events[-1][0] == "backward":
            self._events[-1][1]["by"] = "engine"
        return result

    def _around_step(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if self.recording:
            self._events.append(("step", None))
        return original(*args, **kwargs)

    def _norming(self, original: Any) -> Any:
        def total_norm(tensors: Any, norm_type: float = 2.0, error: bool = False, foreach: bool | None = None) -> Any:
            if self.recording:
                self._norm = norm_type, foreach
            return original(tensors, norm_type, error, foreach)

        return total_norm

    def _clipping(self, original: Any) -> Any:
        def clip(parameters: Any, max_norm: float, total_norm: torch.Tensor, foreach: bool | None = None) -> Any:
            parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            own = {id(one) for one in self._named.values()}
            is_own = {id(one) in own for one in parameters if one.grad is not None}
            if self.recording and is_own == {True}:
                self._clips.append((parameters, max_norm, self._norm, foreach))
            elif self.recording and is_own == {True, False}:
                self.obstacle = "the loop clips gradients of other modules with those of this one"
            return original(parameters, max_norm, total_norm, foreach)

        return clip

    @_harmless
    def before_update(self) -> None:
        """The update begins: note its hyperparameters, and the gradients that it uses."""
        self._groups = [hyperparameters(one) for one in self._adapter.optimizers]
        self._note_reduced()

    def _note_reduced(self) -> None:
        if not self._adapter.updates_itself:
            present = {name: one.grad for name, one in self._named.items() if one.grad is not None}
            self._evidence.reduced = {name: self._fingerprint(local(one)) for name, one in present.items()}

    def cancel(self) -> None:
        """Remove the hooks: the step is not repeated, or is complete."""
        self.recording = False
        self._hooks.remove()

    def end(self) -> None:
        """The step is complete: note its state."""
        self.cancel()
        self._scalars = copy.deepcopy(self._adapter.scalars())
        self._random = self._random_states()
        self._small = [(one, state) for one in self._objects if (state := _small_state(one)) is not None]
        self._attributes_after = ModuleAttributes(self._adapter.module)
        if any(one.random_after is None for one in self._forwards):
            self.obstacle = self.obstacle or "a forward of the step failed"
        elif not any(kind == "backward" for kind, _ in self._events):
            self.obstacle = self.obstacle or "no backward reached an output of the module"
        elif self.obstacle is None and self._reach is not None:
            changed = Reach(self._adapter.module, self._saved).changed(self._reach)
            self.obstacle = None if changed is None else f"a step changes {changed}, which CPSR cannot bring back"
        if self.obstacle is None:
            self._left = {name: self._gradient_left(name, one.grad) for name, one in self._named.items()}
        if "other" in self._left.values():
            self.obstacle = "the loop or its optimizer changes gradients that the update has used"
        self._note_state()

    def _random_states(self) -> dict[str, Any]:
        own = capture_random_states(self._adapter)
        return {**own, "registered": [one.state_dict() for one in self._generators]} if self._generators else own

    def _restore_random(self, states: dict[str, Any]) -> None:
        restore_random_states(self._adapter, states)
        for one, state in zip(self._generators, states.get("registered", ()), strict=False):
            one.load_state_dict(state)

    def _gradient_left(self, name: str, gradient: torch.Tensor | None) -> str:
        if gradient is None:
            return "none"
        if not _any([gradient]):
            return "zeros"
        is_as_used = _same(self._fingerprint(local(gradient)), self.first.reduced.get(name))
        return "as used" if self._adapter.updates_itself or is_as_used else "other"

    def _note_state(self) -> None:
        named = self._adapter.shard().tensors()
        self._evidence.state = {key: self._fingerprint(values) for key, values in named}

    # Without the loop

    def repeat(self, step: "Inputs | None" = None, *, updates: bool = True) -> Evidence:
        """Execute the step again, from the state in the engine; a collective where the step is one.

        Args:
            step: another rank's inputs; None: this rank's own.
            updates: whether the update follows; an engine that reduces in its own way is updated always.

        Raises:
            RuntimeError: and whatever the module raises.
        """
        adapter = self._adapter
        forwards, events = (self._forwards, self._events) if step is None else (step.forwards, step.events)
        self._evidence, self._counted, self.in_forward = Evidence(), Counter(), True
        hooks = [_hooked(one, partial(self._on_gradient, name)) for name, one in self._named.items()]
        # The loop's update may run where torch records no graph.
        with adapter.unobserved(), self._silenced(), torch.inference_mode(False), torch.enable_grad():
            self._clear_gradients()
            try:
                self._execute(forwards, events)
            finally:
                for hook in hooks:
                    hook.remove()
            if not adapter.updates_itself and updates:
                self._update()
            self._note_state()
        return self._evidence

    def _execute(self, forwards: Sequence[Forward], events: Sequence[tuple[str, Any]]) -> None:
        outputs: dict[int, list[torch.Tensor]] = {}
        with ExitStack() as contexts:
            entered: Any = None
            for kind, what in events:
                if kind == "forward":
                    if forwards[what].autocast != entered:  # else in one context, with its cache, as in the loop
                        contexts.close()
                        entered = forwards[what].autocast
                        enter_autocast(contexts, entered)
                    outputs[what] = self._forward(what, forwards[what])
                    continue
                contexts.close()
                entered = None
                if kind == "backward":
                    self._backward(forwards, outputs, what)
                else:
                    self._load_groups()
                    self._adapter.called.step()

    def _forward(self, index: int, one: Forward) -> list[torch.Tensor]:
        adapter = self._adapter
        attributes = one.attributes or self._forwards[0].attributes
        assert attributes is not None  # of this rank's forwards
        attributes.restore()
        self._restore_random(one.random)
        adapter.reduces_gradients = one.reduces
        args, kwargs = copied((one.args, one.kwargs))  # a forward may change them
        found = self._note_outputs(index, adapter.called(*args, **kwargs))
        if one.random_after is not None and not same(self._random_states(), one.random_after):
            self._evidence.outputs[f"random states after forward {index}"] = "others"
        return found

    def _backward(self, forwards: Sequence[Forward], outputs: dict[int, list[torch.Tensor]], what: Any) -> None:
        given = [(outputs[index][number], forwards[index].gradients[number]) for index, number in what["outputs"]]
        self.in_forward = False
        roots = [output for output, _ in given]
        gradients = [gradient.to(output.device) for output, gradient in given]
        for output, gradient in zip(roots, gradients, strict=True):  # a loss may be computed from another output
            _hooked(output, partial(_instead, gradient))
        if what.get("by") == "engine":
            apply: Callable[..., torch.Tensor] = RecordedLoss.apply
            self._adapter.called.backward(apply(gradients, *roots))
        else:
            torch.autograd.backward(roots, gradients)

    def _update(self) -> None:
        for parameters, max_norm, (norm_type, foreach), each in self._clips:
            gradients = [one.grad for one in parameters if one.grad is not None]
            total = clip_grad._get_total_norm(gradients, norm_type, False, foreach)
            clip_grad._clip_grads_with_norm_(parameters, max_norm, total, each)
        self._note_reduced()
        self._load_groups()
        for optimizer in self._adapter.optimizers:
            with _without_hooks(optimizer):
                optimizer.step()

    def _load_groups(self) -> None:
        for optimizer, groups in zip(self._adapter.optimizers, self._groups, strict=True):
            load_hyperparameters(optimizer, groups)

    def _clear_gradients(self) -> None:
        """As they were when the first backward began."""
        absent = self._without_gradient or set()
        for name, parameter in self._named.items():
            if name in absent or parameter.grad is None:
                parameter.grad = None
            else:
                parameter.grad.zero_()

    @contextmanager
    def _silenced(self) -> Iterator[None]:
        """The engine prints and counts nothing of what is repeated."""
        hooks, engine = Hooks(), self._adapter.called
        if self._adapter.updates_itself:
            hooks.replace(engine, "_report_progress", lambda step: None)
            hooks.replace(engine.monitor, "enabled", False)
        before = self._adapter.reduces_gradients
        try:
            yield
        finally:
            hooks.remove()
            self._adapter.reduces_gradients = before

    def settle(self) -> None:
        """The engine has the weights after the step again: bring the rest to where the loop had left it."""
        self._adapter.load_scalars(copy.deepcopy(self._scalars))
        self._attributes_after.restore()
        self._restore_random(self._random)
        for one, state in self._small:
            if not same(one.state_dict(), state):
                one.load_state_dict(copy.deepcopy(state))
        for name, parameter in self._named.items():
            if self._left[name] == "none":
                parameter.grad = None
            elif self._left[name] == "zeros" and parameter.grad is not None:
                parameter.grad.zero_()

    # Of another rank

    @property
    def surroundings(self) -> str:
        """A hash of what modules keep beside parameters and buffers, with which the step began on this rank."""
        attributes = self._forwards[0].attributes
        assert attributes is not None
        return attributes.digest()

    @property
    def inputs(self) -> "Inputs":
        """What another rank needs to repeat this step."""
        return Inputs(self._forwards, self._events)


def _small_state(one: Stateful) -> Any:
    """A copy of an object's state; None where that is large, as a second model's: no forward of this one changes it."""
    state = one.state_dict()
    tensors = [leaf for leaf in tree_flatten(state)[0] if isinstance(leaf, torch.Tensor)]
    return copy.deepcopy(state) if sum(leaf.nbytes for leaf in tensors) <= SMALL_BYTES_MAX else None


def _instead(given: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """What a hook on a tensor returns, so that its backward goes on with the gradient that was recorded."""
    return given


def _any(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether some element is not zero; a device is asked once."""
    found = [local(one).any() for one in tensors]
    return bool(found) and bool(torch.stack(found).any())


def _same(one: Any, other: Any) -> bool:
    tensors = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    return torch.equal(one, other) if tensors else bool(one == other)


def _hooked(tensor: torch.Tensor, hook: Callable[[torch.Tensor], torch.Tensor | None]) -> RemovableHandle:
    register: Callable[..., RemovableHandle] = tensor.register_hook
    return register(hook)


@contextmanager
def _without_hooks(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Nobody is told of a step inside, as an average of the weights would be."""
    names = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
    before = [getattr(optimizer, name) for name in names]
    for name in names:
        setattr(optimizer, name, type(before[0])())
    try:
        yield
    finally:
        for name, hooks in zip(names, before, strict=True):
            setattr(optimizer, name, hooks)
