"""Blobs from tensors and tensors from blobs. Modules that only check or move blobs import no torch."""

from __future__ import annotations

from collections.abc import Sequence

from kvshelf.artifact.blob import PackedBlob, as_view, check_runs, check_segment, inspect
from kvshelf.artifact.blob.body import Body
from kvshelf.artifact.blob.digests import digests_of
from kvshelf.artifact.blob.frame import TRAILER, Buffer, close_frame
from kvshelf.artifact.blob.header import HEADER_LIMIT, Header, IdentityHeader, parse_header
from kvshelf.artifact.blob.layer import DIGEST_BYTES, Layer, aligned, digests_bytes
from kvshelf.artifact.blob.segment import read_layer, write_layer
from kvshelf.artifact.identity import Identity
from kvshelf.artifact.positions import to_deltas
from kvshelf.artifact.records import LayerRecord
from kvshelf.errors import BlobError, InvalidRequest


def decode(data: Buffer) -> tuple[Header, tuple[LayerRecord, ...]]:
    """Read a blob: its header and its layers. Checks every digest before it makes a tensor. Raises `BlobError` for any
    bytes that `pack` does not write.

    The tensors are views of `data` and keep it alive. Neither `data` nor the tensors may be changed afterwards.
    """
    header = inspect(data).header
    view = as_view(data)[-header.body_bytes - TRAILER.size :]
    for index, layer in enumerate(header.layers):
        segment = view[layer.offset : layer.offset + layer.nbytes]
        check_segment(index, layer, segment)
        check_runs(index, layer, segment)
    body = Body(view)
    return header, tuple(read_layer(index, header, body) for index in range(len(header.layers)))


def pack(
    records: Sequence[LayerRecord],
    num_tokens: int,
    next_position: int,
    identity: Identity,
    codec: str,
    sentence_ends: Sequence[int],
    summary: Sequence[bytes],
) -> PackedBlob:
    """Lay the fields of a `CompressedCache` out as a blob and compute its digests. Equal fields give equal bytes.

    Raises `InvalidRequest` for what the format cannot hold: a dtype other than float32, bfloat16 and float16, a header
    over 256 KiB, records that contradict themselves.
    """
    layers: list[Layer] = []
    segments: list[tuple[memoryview, ...]] = []
    offset = 0
    for record in records:
        layer, buffers = _segment(record, num_tokens, offset)
        layers.append(layer)
        segments.append(tuple(buffers))
        offset += layer.nbytes
    try:
        header = Header(
            identity=IdentityHeader.model_validate(identity.to_dict()),
            num_tokens=num_tokens,
            next_position=next_position,
            codec=codec,
            sentence_ends=to_deltas(sentence_ends),
            layers=layers,
            summary=list(summary),
        )
        packed = header.pack()
        parse_header(packed)  # what cannot be read back is refused before it is stored
    except (ValueError, OverflowError, BlobError) as error:
        raise InvalidRequest(f"the cache cannot be written as a blob: {error}") from error
    if len(packed) > HEADER_LIMIT:
        raise InvalidRequest(
            f"the cache's description takes {len(packed)} bytes, the format allows {HEADER_LIMIT}; shorten the policy "
            "parameters, the probe text or the expected questions"
        )
    head, trailer = close_frame(packed, header.body_bytes)
    nbytes = len(head) + offset + len(trailer)
    return PackedBlob(((memoryview(head),), *segments, (memoryview(trailer),)), nbytes, trailer[8:], header)


def _segment(record: LayerRecord, num_tokens: int, offset: int) -> tuple[Layer, list[memoryview]]:
    """One layer's header and the buffers of its segment, padding included."""
    written = write_layer(record, num_tokens)
    buffers: list[memoryview] = []
    for data in written.arrays:
        buffers += [data, memoryview(bytes(aligned(len(data)) - len(data)))]
    rows = sum(map(len, buffers))
    layer = Layer(
        **written.dims._asdict(),
        records=written.records,
        states=written.states,
        offset=offset,
        nbytes=rows + aligned(digests_bytes(written.records)),
        digest=bytes(DIGEST_BYTES),
    )
    digest, digests = digests_of(layer, buffers)
    buffers += [memoryview(digests), memoryview(bytes(layer.digests_padding))]
    return layer.model_copy(update={"digest": digest}), buffers
