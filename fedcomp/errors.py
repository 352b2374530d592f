"""Every error fedcomp raises on purpose.

    FedcompError (ValueError)
    ├── ConfigError        a codec, plan or experiment is described wrongly
    │   └── BudgetError          a budget that the smallest frame does not fit in
    ├── LayoutError        tensors do not fit the model: name, shape or dtype
    ├── ExportError        a model that cannot become a training bundle, or whose bundle is wrong
    ├── NonFiniteError     NaN or infinity where a number is needed
    ├── BundleError        a folder that is no sound training bundle
    ├── DataError          training data that do not fit the model
    └── FrameError         bytes that are no valid frame for this model
        ├── RoundError           a sound frame of another round
        ├── StaleModelError      a sound package that changes a model which is not held
        └── UnboundedError       a sound frame that would make the model NaN or infinite (also a NonFiniteError)

Messages say what was expected, what came, where, and what to do about it.
"""


class FedcompError(ValueError):
    """Base of all errors raised by fedcomp for bad input."""


class ConfigError(FedcompError):
    """A codec, plan, feedback or experiment is described wrongly: unknown name, unknown key, value out of range."""


class LayoutError(FedcompError):
    """Tensors do not fit the layout they are used with: a name, shape or dtype differs."""


class ExportError(FedcompError):
    """A model cannot be exported for training on a device, or what came out does not do what torch does."""


class NonFiniteError(FedcompError):
    """An update holds NaN or infinity. Raised before anything is changed: no residual, no frame."""


class BundleError(FedcompError):
    """A training bundle is incomplete, damaged, or of a version that this fedcomp cannot read."""


class DataError(FedcompError):
    """Training data do not fit the model: shape, dtype, labels out of range, or values that are no numbers."""


class FrameError(FedcompError):
    """Bytes are damaged, forged, of another version, or meant for another model, round or plan."""


class RoundError(FrameError):
    """A frame is sound, but of another round than the one that was asked for."""


class UnboundedError(FrameError, NonFiniteError):
    """A frame is sound, but the model it stands for is not finite."""


class StaleModelError(FrameError):
    """A package changes a model that this client does not hold; the server must send the whole model."""


class BudgetError(ConfigError):
    """A budget is too small for the model: the message tells the smallest that works."""
