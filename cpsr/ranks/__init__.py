"""Communication between ranks: side group, agreement, heartbeats, signals, and how each of them ended."""
