"""How well the loss curve is fitted and forecast online, at the ends of training phases."""
