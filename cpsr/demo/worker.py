"""One process of the demo's job, as `cpsr run` starts it: notes when it had imported what, and runs the job."""

from importlib import import_module

from cpsr.demo.notes import FRAMEWORKS, PRODUCT, STARTED, Notes, process_started_unix_seconds


def main() -> None:
    """Import what the job needs, one after the other, and run it."""
    notes = Notes({STARTED: process_started_unix_seconds()})
    import_module("torch")
    import_module("deepspeed")
    notes.add(FRAMEWORKS)
    import_module("cpsr.recovery")
    notes.add(PRODUCT)
    from cpsr.demo import job

    job.main(notes)


if __name__ == "__main__":
    main()
