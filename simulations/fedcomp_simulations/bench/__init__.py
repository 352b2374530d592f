"""Rate, error and speed of every codec side by side: what `fedcomp bench` runs."""
