"""The list of messages has what is raised, under the class whose section explains it."""

from cpsr import errors
from docs.site.messages import found, text


def test_every_class_that_is_raised_has_its_messages() -> None:
    messages = found()
    raised = set(errors.__all__) - {"JournalDamagedError"}  # made of what SQLite says
    assert messages.keys() == raised
    assert sum(map(len, messages.values())) > 350


def test_what_is_filled_in_stands_in_angle_brackets() -> None:
    messages = found()
    assert "no run is open: this belongs inside the `with CPSRRecovery(...)` block" in messages["ConfigError"]
    assert any(message.startswith("cannot read the configuration <path>: ") for message in messages["ConfigError"])


def test_texts_that_a_module_has_named_are_written_out() -> None:
    assert any("<" not in message.rpartition(";")[2] for message in found()["RunMismatchError"])
    assert "<KEPT>" not in text()


def test_classes_of_other_modules_are_listed_with_their_base() -> None:
    assert any("its SHA-256 is not the one in" in message for message in found()["CheckpointCorruptError"])
