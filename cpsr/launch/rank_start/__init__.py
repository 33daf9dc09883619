"""A folder that `cpsr run` puts first on the `PYTHONPATH` of its ranks; Python imports its one module by itself."""
