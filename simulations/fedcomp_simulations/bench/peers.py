"""Codecs of other projects on the same terms, where they happen to be installed. A missing one is a note, not an error.

None of them is a dependency. What is counted is what each hands to its transport.
"""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from fedcomp.layout import Vector
from fedcomp_simulations.bench.inputs import Input
from fedcomp_simulations.bench.measure import Row, measure_functions

Pair = tuple[Callable[[], bytes], Callable[[bytes], Vector]]
"""Encode the input to bytes, decode bytes to a vector."""


@dataclass(frozen=True)
class Peer:
    """A codec of another project: the module that must be there, and how to make its two functions for an input."""

    name: str
    module: str
    make: Callable[[Input], Pair]


def measure_peers(given: Input, say: Callable[[str], None]) -> Iterator[Row]:
    """Measure every peer that is installed; `say` gets a note for each other one."""
    for peer in PEERS:
        try:
            importlib.import_module(peer.module)
            encode, decode = peer.make(given)
            yield measure_functions(peer.name, {"peer": peer.module}, given, encode, decode, None)
        except ImportError as error:
            say(f"{peer.name}: left out, {error}")
        except Exception as error:  # a peer that breaks on this numpy or this input must not end the bench
            say(f"{peer.name}: failed, {type(error).__name__}: {error}")


def _nf4(given: Input) -> Pair:
    """4-bit NormalFloat with a float32 scale for 64 values (bitsandbytes), as one flat vector."""
    import torch
    from bitsandbytes import functional as bnb

    x = torch.from_numpy(given.x.copy())
    _, state = bnb.quantize_4bit(x, blocksize=64, quant_type="nf4")
    packed = -(-x.numel() // 2)

    def encode() -> bytes:
        q, new = bnb.quantize_4bit(x, blocksize=64, quant_type="nf4")
        return bytes(q.numpy().tobytes() + new.absmax.numpy().tobytes())

    def decode(frame: bytes) -> Vector:
        q = torch.from_numpy(np.frombuffer(frame, np.uint8, packed).copy()).reshape(-1, 1)
        state.absmax = torch.from_numpy(np.frombuffer(frame, np.float32, offset=packed).copy())
        values: Vector = bnb.dequantize_4bit(q, state).numpy().ravel()
        return values

    return encode, decode


def _blockwise8(given: Input) -> Pair:
    """8 bit in blocks of 4096 as hivemind sends it: a protobuf message with codebook, scales and indices."""
    import torch
    from hivemind.compression import deserialize_torch_tensor, serialize_torch_tensor
    from hivemind.proto import runtime_pb2

    x = torch.from_numpy(given.x.copy())

    def encode() -> bytes:
        message = serialize_torch_tensor(x, runtime_pb2.CompressionType.BLOCKWISE_8BIT)
        return bytes(message.SerializeToString())

    def decode(frame: bytes) -> Vector:
        message = runtime_pb2.Tensor()
        message.ParseFromString(frame)
        values: Vector = deserialize_torch_tensor(message).numpy()
        return values

    return encode, decode


def _powersgd(rank: int) -> Callable[[Input], Pair]:
    """The arithmetic of torch's PowerSGD hook on one worker: P = M Q, orthonormal, Q = M^T P; vectors as they are."""

    def make(given: Input) -> Pair:
        import torch

        if all(len(t.shape) < 2 for t in given.layout.tensors):
            raise ValueError("the input has no matrix")
        tensors = [(t.shape, torch.from_numpy(given.x[where].copy())) for t, where in given.layout.slices()]
        starts = [torch.randn(_columns(s), rank, generator=torch.Generator().manual_seed(0)) for s, _ in tensors]
        sizes = [(s[0] + _columns(s)) * rank if len(s) > 1 else v.numel() for s, v in tensors]

        def encode() -> bytes:
            sent: list[bytes] = []
            for (shape, values), start in zip(tensors, starts, strict=True):
                if len(shape) < 2:
                    sent.append(values.numpy().tobytes())
                    continue
                matrix = values.reshape(shape[0], -1)
                p, _ = torch.linalg.qr(matrix @ start)
                sent += [p.numpy().tobytes(), (matrix.T @ p).numpy().tobytes()]
            return b"".join(sent)

        def decode(frame: bytes) -> Vector:
            floats, out, at = np.frombuffer(frame, np.float32), [], 0
            for (shape, _), size in zip(tensors, sizes, strict=True):
                part = floats[at : at + size]
                at += size
                if len(shape) > 1:
                    p, q = part[: shape[0] * rank].reshape(-1, rank), part[shape[0] * rank :].reshape(-1, rank)
                    part = (p @ q.T).ravel()
                out.append(part)
            return np.concatenate(out)

        return encode, decode

    return make


def _columns(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape[1:]))


def _sz3(bound: float) -> Callable[[Input], Pair]:
    """SZ3 with an absolute error bound in units of the input's rms (pysz; what FedSZ builds on)."""

    def make(given: Input) -> Pair:
        from pysz import sz, szConfig, szErrorBoundMode

        config: Any = szConfig()
        config.errorBoundMode = szErrorBoundMode.ABS
        config.absErrorBound = bound * float(np.sqrt(np.square(given.x, dtype=np.float64).mean()))

        def encode() -> bytes:
            return bytes(sz.compress(given.x, config)[0].tobytes())

        def decode(frame: bytes) -> Vector:
            values: Vector = sz.decompress(np.frombuffer(frame, np.uint8), np.float32, given.x.shape)[0]
            return values

        return encode, decode

    return make


def _nncodec(qp: int) -> Callable[[Input], Pair]:
    """NNCodec (ISO 15938-17, DeepCABAC with dependent quantization) on the input scaled to an rms of one."""

    def make(given: Input) -> Pair:
        from nncodec import tensor as nnc

        rms = float(np.sqrt(np.square(given.x, dtype=np.float64).mean())) or 1.0
        scaled = given.x / np.float32(rms)

        def encode() -> bytes:
            with TemporaryDirectory() as folder:  # it writes its stream to a file whether one wants it or not
                return bytes(nnc.encode(scaled, {"qp": qp, "results": folder, "job_identifier": "bench"}))

        def decode(frame: bytes) -> Vector:
            values: Vector = np.asarray(nnc.decode(bytearray(frame)), np.float32).ravel() * np.float32(rms)
            return values

        return encode, decode

    return make


PEERS: tuple[Peer, ...] = (
    Peer("bitsandbytes nf4", "bitsandbytes", _nf4),
    Peer("hivemind blockwise 8 bit", "hivemind", _blockwise8),
    Peer("torch PowerSGD rank 1", "torch", _powersgd(1)),
    Peer("torch PowerSGD rank 4", "torch", _powersgd(4)),
    Peer("SZ3, bound 1 rms", "pysz", _sz3(1.0)),
    Peer("SZ3, bound 0.1 rms", "pysz", _sz3(0.1)),
    Peer("NNCodec qp -8", "nncodec", _nncodec(-8)),
    Peer("NNCodec qp 0", "nncodec", _nncodec(0)),
)
