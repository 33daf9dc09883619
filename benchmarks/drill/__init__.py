"""`cpsr bench drill`: one job under one schedule of failures, with CPSR and with other ways to come back."""
