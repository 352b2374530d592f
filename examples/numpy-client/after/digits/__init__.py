"""digits: A Flower app with NumPyClient."""
