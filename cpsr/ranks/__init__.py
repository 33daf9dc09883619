"""Communication between ranks: side group, votes, heartbeats, signals, and how each of them ended."""
