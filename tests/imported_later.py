"""What CPSR imports only while a job runs, and takes a second: imported before a fork, each rank has it already."""

# ruff: noqa: F401

import scipy.special
import torch._dynamo  # by the first optimizer

import cpsr.engines
import cpsr.experts.saving
import cpsr.learning.learning
import cpsr.life.life
import cpsr.planner.live.job_planner
import cpsr.recovery
