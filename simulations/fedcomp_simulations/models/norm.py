"""What may follow a convolution."""

from torch import nn


def normalization(norm: str, channels: int, batch: type[nn.BatchNorm1d] | type[nn.BatchNorm2d]) -> nn.Module:
    """Make a layer that normalizes channels: nothing, GroupNorm in groups of at least two, or BatchNorm.

    GroupNorm (Wu and He 2018, arXiv:1803.08494) has no running statistics, so it is the one to prefer where clients
    differ: theirs would be averaged, and travel in full with every upload. So would scales and shifts of its own, which
    it therefore does without; on the IMU task this made no difference in accuracy.
    """
    if norm == "none":
        return nn.Identity()  # has no place in the state
    return nn.GroupNorm(min(8, channels // 2), channels, affine=False) if norm == "group" else batch(channels)
