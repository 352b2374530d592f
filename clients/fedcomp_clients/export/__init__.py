"""Export of a torch model as a training bundle, on a workstation with torch, onnx and onnxscript.

    from fedcomp_clients.export import SGD, export_training_bundle

    export_training_bundle(model, "cross_entropy", (x, y), "bundle", optimizer=SGD(momentum=0.9))

A device then trains from the bundle with numpy and onnxruntime alone. Nothing that a device imports imports this.
"""

from fedcomp.errors import ExportError
from fedcomp_clients.export.bundle import Exported, export_training_bundle
from fedcomp_clients.export.model import LOSSES
from fedcomp_clients.manifest import SGD

__all__ = ["LOSSES", "SGD", "ExportError", "Exported", "export_training_bundle"]
