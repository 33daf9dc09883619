"""What CPSR imports only while a job runs, and takes a second: imported before a fork, each rank has it already."""

from importlib import import_module

for _module in (
    "cpsr.recovery",
    "cpsr.life.life",
    "cpsr.planner.live.job_planner",
    "cpsr.learning.learning",
    "cpsr.experts.saving",
    "scipy.optimize",
    "sklearn.isotonic",
    "sklearn.linear_model",
):
    import_module(_module)
