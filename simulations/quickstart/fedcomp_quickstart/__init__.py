"""A Flower app with compressed uploads."""
