"""`cpsr bench tune`: at which peak learning rate a workload ends best."""
