"""digits: A Flower / PyTorch app."""
