"""Training of VITP's head on past windows: a bounded number of small steps for each checkpoint."""

from collections.abc import Generator, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.optim.adamw import adamw

from cpsr.predictor.examples import Question, Windows
from cpsr.predictor.vitp_network import (
    PARAMETERS,
    TINY,
    coefficients,
    corrections,
    cosines,
    initial_parameters,
    named,
    pretrained_parameters,
    undisturbed,
)

__all__ = ["STEPS_PER_CHECKPOINT", "Head", "Questions", "loss_slope"]

STATE_VERSION = 2
FROM_THE_LINE = 1  # networks that began at the line
# Some 0.03 s of one core for each checkpoint, at 4 ms a step, in two slices. 32 were no better on other runs.
STEPS_PER_CHECKPOINT = 8
# Of 1e-3 and 3e-4 the latter found slow directions better on a byte-level GPT at intervals of 20 and 50 iterations,
# where 1e-3 was behind the line at 20.
LEARNING_RATE = 3e-4
WEIGHT_DECAY = 1e-2  # AdamW's usual one
BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8  # likewise
# Any number: what matters is that it is the same in every life of every run.
SEED = 20_261_121


class Questions(Protocol):
    """What a head is trained on."""

    def draw(self, generator: torch.Generator) -> Question:
        """A random query with its answer."""


class Head:
    """The network's weights and what their training goes on from.

    Args:
        parameters: to start from, `(PARAMETERS,)` float32; None: those that were pretrained on other runs.

    Attributes:
        parameters: all weights, `(PARAMETERS,)` float32 on the CPU.
        steps: how often they were updated since that start.
    """

    parameters: torch.Tensor
    steps: int

    def __init__(self, parameters: torch.Tensor | None = None) -> None:
        start = pretrained_parameters() if parameters is None else parameters
        with undisturbed():
            nothing = torch.zeros(PARAMETERS, dtype=torch.float32, device="cpu")
        self._stand(start, nothing, nothing, steps=0)

    @classmethod
    def untrained(cls) -> "Head":
        """A head whose directions are exactly the line's."""
        return cls(initial_parameters(torch.Generator(device="cpu").manual_seed(SEED)))

    def copy(self) -> "Head":
        """Another head that goes on from here."""
        other = Head(self.parameters.detach())
        other.load_state_dict(self.state_dict())
        return other

    def step(self, examples: Questions, generator: torch.Generator) -> Iterator[None]:
        """One update towards the later motion of one random window; yields once within it.

        Abandoned in between, `steps` shows no update.
        """
        with undisturbed():
            question = examples.draw(generator)
            answers = coefficients(self._weights, question.geometry, question.seen_products)
        yield
        with undisturbed():
            slope = loss_slope(answers.detach(), question)
            gradients = torch.autograd.grad(answers, list(self._weights.values()), slope)
        self._update(gradients)
        self.steps += 1

    def answer(self, question: Question) -> torch.Tensor:
        """Directions for a question's operators, rows over its window, `(B, m)`."""
        corrected = question.geometry.line + corrections(self.parameters, question.geometry, question.seen_products)
        return question.over_window(corrected)

    def accuracy(self, taken: Sequence[Windows]) -> Generator[None, None, dict[str, float]]:
        """Mean cosines of the line and of this head with the newest difference of each window, by distance moved.

        Yields twice for each window, and returns `line_cosine` and `vitp_cosine`.
        """
        line, vitp, weights = 0.0, 0.0, 0.0
        for window in taken:
            with undisturbed(), torch.no_grad():
                question = window.newest_question()
                straight = question.over_window(question.geometry.line.expand(len(window), -1))
                line += float(_weighted(straight, question))
                weights += float(question.weights.sum())
            yield
            with undisturbed(), torch.no_grad():
                vitp += float(_weighted(self.answer(question), question))
            yield
        return {"line_cosine": line / weights, "vitp_cosine": vitp / weights}

    def state_dict(self) -> dict[str, Any]:
        """Weights and the optimizer's moments, as tensors."""
        return {
            "version": STATE_VERSION,
            "steps": self.steps,
            "parameters": self.parameters.detach().clone(),
            "exp_avg": self._exp_avg.clone(),
            "exp_avg_sq": self._exp_avg_sq.clone(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict()` returned; of version 1 nothing, since what is shipped agrees better.

        Raises:
            ValueError: the state was written by another version, or for another network.
        """
        if state.get("version") == FROM_THE_LINE:
            return
        if state.get("version") != STATE_VERSION or state["parameters"].shape != (PARAMETERS,):
            raise ValueError(
                f"VITP head of version {state.get('version')!r} with {state['parameters'].numel()} weights; this is "
                f"version {STATE_VERSION} with {PARAMETERS}"
            )
        self._stand(state["parameters"], state["exp_avg"], state["exp_avg_sq"], state["steps"])

    def _stand(self, parameters: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, steps: int) -> None:
        with undisturbed():
            self.parameters = parameters.detach().clone()
            # Leaves of the gradients, in the same memory: no update has to split it.
            self._weights = {name: one.requires_grad_() for name, one in named(self.parameters).items()}
            self._exp_avg, self._exp_avg_sq = exp_avg.clone(), exp_avg_sq.clone()
            self._step = torch.tensor(float(steps), dtype=torch.float32, device="cpu")
        self.steps = steps

    def _update(self, gradients: Sequence[torch.Tensor]) -> None:
        """A step of AdamW, from the gradients of `_weights`.

        By its function: the class asks on each step for the accelerator's current stream. On the learner's thread that
        is one of device 0, whatever device this rank has, and would open a context there.
        """
        with undisturbed(), torch.no_grad():
            adamw(
                [self.parameters],
                [torch.cat([gradient.flatten() for gradient in gradients])],
                [self._exp_avg],
                [self._exp_avg_sq],
                [],
                [self._step],
                foreach=False,
                fused=True,
                amsgrad=False,
                beta1=BETA1,
                beta2=BETA2,
                lr=LEARNING_RATE,
                weight_decay=WEIGHT_DECAY,
                eps=EPSILON,
                maximize=False,
            )


def loss_slope(answers: torch.Tensor, question: Question) -> torch.Tensor:
    """Gradient of the loss, 1 less the weighted mean cosine with the later motion, by the network's answers.

    Written out: through autograd a whole update takes a seventh longer, for a hundred calls on small matrices.

    Args:
        answers: what `coefficients` returned for the question, `(B, K)` float32.
        question: of B operators.

    Returns:
        `(B, K)` float32.
    """
    geometry, products = question.geometry, question.products
    with torch.no_grad():
        # From rows over the snapshots that are seen to rows over the window's differences, as in `cosines`.
        places = torch.arange(products.shape[-1], device="cpu")
        onto = -(question.seen.unsqueeze(1) <= places).float()
        rows = (geometry.line + (answers - answers.mean(dim=1, keepdim=True)) @ geometry.denoised) @ onto
        later = -question.later.cumsum(dim=0)[:-1]
        towards = products @ later
        moved = (products @ rows.unsqueeze(2)).squeeze(2)
        inner, squared = (rows * towards).sum(dim=1, keepdim=True), (rows * moved).sum(dim=1, keepdim=True)
        scale = squared.clamp_min(TINY) * (towards @ later).clamp_min(TINY).unsqueeze(1)
        # Below `TINY` the length counts as constant.
        along = moved * (inner / squared).where(squared >= TINY, 0.0)
        share = question.weights.unsqueeze(1) / (question.weights.sum() * scale.sqrt())
        slope = ((along - towards) * share) @ onto.T @ geometry.denoised.T
        return slope - slope.mean(dim=1, keepdim=True)


def _weighted(rows: torch.Tensor, question: Question) -> torch.Tensor:
    """Sum of the cosines with the target directions, weighted by operator."""
    return (cosines(rows, question.later, question.products) * question.weights).sum()
