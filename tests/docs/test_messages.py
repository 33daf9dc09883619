"""The list of messages has what is raised, under the class whose section explains it."""

import ast
import builtins
import re

from cpsr import errors
from docs.site.messages import FOLDERS, ROOT, found, text

# Raised for another part of CPSR, which reports it in words of its own.
INTERNAL = {
    "FileInUseError",
    "JobEndedError",
    "LagBeyondError",
    "RefusedError",
    "WorthUnknownError",
    "_FailureError",
    "_StoppedError",
}


def outside(call: ast.Call) -> bool:
    """Whether an error is one of Python's or of another package, or never leaves CPSR."""
    name = ast.unparse(call.func).rpartition(".")[2]
    return hasattr(builtins, name) or name in INTERNAL or name in ("Exit", "SignalException")


def test_every_class_that_is_raised_has_its_messages() -> None:
    messages = found()
    raised = set(errors.__all__) - {"JournalDamagedError"}  # made of what SQLite says
    assert messages.keys() == raised
    assert sum(map(len, messages.values())) > 350


def test_what_is_filled_in_stands_in_angle_brackets() -> None:
    messages = found()
    assert (
        "no run is open: this belongs inside the `with CPSRRecovery(...)` block, or after open()"
        in messages["ConfigError"]
    )
    assert any(message.startswith("cannot read the configuration <path>: ") for message in messages["ConfigError"])


def test_texts_that_a_module_has_named_are_written_out() -> None:
    assert any("<" not in message.rpartition(";")[2] for message in found()["RunMismatchError"])
    assert "<KEPT>" not in text()


def test_classes_of_other_modules_are_listed_with_their_base() -> None:
    assert any("its SHA-256 is not the one in" in message for message in found()["CheckpointCorruptError"])


def test_messages_that_a_function_puts_together_are_written_out() -> None:
    messages = found()["NotResumableError"]
    assert any(one.endswith(" cannot be resumable: it is no `def`: write it as one") for one in messages)


def test_reasons_stand_in_the_message_that_names_the_value() -> None:
    assert (
        "<name> cannot be saved: it is of <dtype>: only numbers, dates and strings of one length are saved"
        in (found()["NotResumableError"])
    )


def test_what_a_model_of_the_configuration_refuses_is_listed() -> None:
    assert "interval_min_iterations is larger than interval_max_iterations" in found()["ConfigError"]


def test_refusals_of_the_service_are_listed_with_what_to_do() -> None:
    assert (
        "writes_off: this service only reads; start it with --allow-writes, or with a token (--token-file)"
        in (found()["ServiceError"])
    )


def test_no_text_that_is_raised_is_missing() -> None:
    """In no room: what is raised there, and is no class of Python's own, is on the page."""
    listed = "\n".join(line for lines in found().values() for line in lines)
    missing, rooms = [], set()
    for path in sorted({path.resolve() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Raise) or not isinstance(node.exc, ast.Call) or outside(node.exc):
                continue
            texts = [one.value for one in ast.walk(node.exc) if isinstance(one, ast.Constant)]
            told = [one.strip() for one in texts if isinstance(one, str) and len(re.findall(r"[A-Za-z]{3,}", one)) > 3]
            missing += [f"{path.relative_to(ROOT)}:{node.lineno}: {one}" for one in told if one not in listed]
            rooms |= {path.relative_to(ROOT).parts[-2]} if told else set()
    assert not missing, "\n".join(missing)
    assert rooms >= {"doctor", "hints", "replay", "elastic"}
