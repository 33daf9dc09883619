"""What all tests share."""

import os

from hypothesis import settings

# The same examples at every run there, so that a red run is the change's; elsewhere new ones are drawn each time.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")
