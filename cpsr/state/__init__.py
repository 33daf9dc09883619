"""The state of a rank: its shard, the small exact state, and the data position."""
