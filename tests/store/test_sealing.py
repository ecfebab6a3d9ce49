"""Encryption at rest: what was sealed comes back, and nothing else ever does."""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import random
import struct
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from io import BufferedReader, BytesIO, FileIO, RawIOBase
from pathlib import Path

import pytest
from blake3 import blake3
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given
from hypothesis import strategies as st

from kvshelf.artifact import blob
from kvshelf.artifact.cache import CompressedCache
from kvshelf.artifact.opened.arriving import ArrivingCache
from kvshelf.errors import BlobError, InvalidRequest, StoreUnavailable
from kvshelf.store import sealing
from kvshelf.store.sealing import SealedFile, is_sealed, key_id_of, seal, unseal
from kvshelf.store.sealing.keyring import Keyring
from tests.store.caches import golden_caches, make_cache, require_equal

GOLDEN = Path(__file__).parents[1] / "artifact" / "golden" / "sealed.kvs"
"""The blob `bitmap-bfloat16`, sealed by `sealed_by_hand` with `KEYS[0]` and a salt that counts from 0 to 31."""

KEYS = [bytes([index] * 32) for index in (1, 2, 3)]
RING = Keyring(KEYS[:1])
TENANT, SUBJECT = "acme", "kvs_" + "0f" * 20
PARTS = (b"head" * 4, b"first layer", b"2", b"trailer")
PIECE = 1 << 18
"""Bytes that are encrypted at a time."""

Part = Sequence[bytes] | bytes


class Bytes(RawIOBase):
    """A file in memory that gives at most `most` bytes per read and can end early."""

    def __init__(self, data: bytes, most: int = 1 << 30) -> None:
        self.data = BytesIO(data)
        self.most = most
        self.count = 0  # bytes that were read

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        return self.data.seek(offset, whence)

    def readinto(self, buffer: memoryview, /) -> int:  # type: ignore[override]
        count = self.data.readinto(memoryview(buffer)[: self.most])
        self.count += count
        return count


def sealed(parts: Sequence[Part] = PARTS, ring: Keyring = RING, tenant: str = TENANT, subject: str = SUBJECT) -> bytes:
    buffers = [[memoryview(part)] if isinstance(part, bytes) else [memoryview(b) for b in part] for part in parts]
    sealed_parts = seal(ring, tenant, subject, buffers)
    data = b"".join(sealed_parts.buffers)
    assert len(data) == sealed_parts.nbytes
    return data


def opened(data: bytes, ring: Keyring = RING, tenant: str = TENANT, subject: str = SUBJECT) -> SealedFile:
    return unseal(ring, tenant, subject, Bytes(data), len(data))


def plain(data: bytes, ring: Keyring = RING, tenant: str = TENANT, subject: str = SUBJECT) -> bytes:
    with opened(data, ring, tenant, subject) as file:
        return file.read()


def refusal(data: bytes, tenant: str = TENANT, subject: str = SUBJECT) -> str:
    with pytest.raises(BlobError) as error:
        plain(data, tenant=tenant, subject=subject)
    return error.value.reason


def layout(data: bytes) -> tuple[int, list[int]]:
    """Where the parts of a sealed blob begin, and their plain lengths."""
    count = int.from_bytes(data[52:56], "little")
    return 56 + 8 * count, list(struct.unpack(f"<{count}Q", data[56 : 56 + 8 * count]))


def split(data: bytes) -> tuple[bytes, list[bytes]]:
    """Header and sealed parts."""
    start, lengths = layout(data)
    header, parts = data[:start], []
    for length in lengths:
        parts.append(data[start : start + length + 16])
        start += length + 16
    assert start == len(data)
    return header, parts


def framed(*parts: bytes) -> bytes:
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


def sealed_by_hand(key: bytes, salt: bytes, tenant: str, subject: str, parts: Sequence[bytes]) -> bytes:
    """docs/internals/format.md, written a second time: HKDF as RFC 5869 has it, GCM in one call per part."""
    header = b"KVSEALED" + struct.pack("<HH", 1, 0)
    header += blake3(framed(b"kvshelf.key", key)).digest()[:8] + salt
    header += struct.pack(f"<I{len(parts)}Q", len(parts), *map(len, parts))
    extracted = hmac.digest(salt, key, hashlib.sha256)
    blob_key = hmac.digest(extracted, framed(b"kvshelf.seal", tenant.encode()) + b"\1", hashlib.sha256)
    associated = framed(header, tenant.encode(), subject.encode())
    gcm = AESGCM(blob_key)
    return header + b"".join(
        gcm.encrypt(index.to_bytes(12, "little"), part, associated) for index, part in enumerate(parts)
    )


# The format


def test_the_bytes_are_what_the_documentation_says() -> None:
    data = sealed((b"ab", bytes(PIECE), os.urandom(3 * PIECE + 17), b"z"))
    with opened(data) as file:
        lengths = layout(data)[1]
        parts = [file.read(length) for length in lengths]
    assert data == sealed_by_hand(KEYS[0], data[20:52], TENANT, SUBJECT, parts)


def test_a_blob_sealed_in_the_past_opens() -> None:
    data, expected = GOLDEN.read_bytes(), GOLDEN.with_name("bitmap-bfloat16.kvb").read_bytes()
    assert plain(data) == expected
    parts = [b"".join(part) for part in CompressedCache.from_bytes(expected).pack().parts]
    assert sealed_by_hand(KEYS[0], bytes(range(32)), TENANT, SUBJECT, parts) == data


def test_the_header_tells_what_rotation_needs() -> None:
    data = sealed()
    assert is_sealed(data[:8])
    assert not is_sealed(make_cache().to_bytes()[:8])
    assert key_id_of(data[:56]) == RING.sealing_id
    assert plain(data) == b"".join(PARTS)


def test_equal_parts_are_never_sealed_alike() -> None:
    first, second = sealed((b"same", b"same")), sealed((b"same", b"same"))
    assert first[20:52] != second[20:52], "a fresh salt"
    parts = split(first)[1] + split(second)[1]
    assert len({part[:4] for part in parts}) == 4


def test_what_the_format_cannot_hold_is_refused() -> None:
    too_many = [[memoryview(b"a")]] * (sealing.PARTS_LIMIT + 1)
    assert plain(sealed([b"a"] * sealing.PARTS_LIMIT)) == b"a" * sealing.PARTS_LIMIT
    for parts in ([], [[]], [[memoryview(b"")]], too_many):
        with pytest.raises(InvalidRequest, match="cannot be sealed"):
            seal(RING, TENANT, SUBJECT, parts)


def test_a_part_beyond_the_limit_of_gcm_is_refused() -> None:
    one = memoryview(bytes(1 << 24))
    parts = [[one] * (1 << 12)]  # 2^36 bytes, which need not be in memory at once
    with pytest.raises(InvalidRequest, match="at most 68719476704"):
        seal(RING, TENANT, SUBJECT, parts)
    assert seal(RING, TENANT, SUBJECT, [[one] * ((1 << 12) - 1)]).nbytes == (1 << 36) - (1 << 24) + 80


# Reading


@given(
    st.lists(st.lists(st.binary(max_size=9) | st.integers(0, 3).map(lambda n: bytes(n * PIECE + n)), max_size=3)),
    st.data(),
)
def test_what_was_sealed_comes_back_however_it_is_read(parts: list[list[bytes]], data: st.DataObject) -> None:
    expected = b"".join(b"".join(part) for part in parts)
    if not expected:
        return
    both = BytesIO(expected), opened(sealed(parts))
    assert both[1].nbytes == len(expected)
    place = st.integers(0, len(expected) + 3)
    for _ in range(data.draw(st.integers(1, 8))):
        size = data.draw(place)
        offset = data.draw(st.none() | place)
        if offset is not None:
            assert both[1].seek(offset) == both[0].seek(offset) == both[1].tell()
        assert both[1].read(size) == both[0].read(size)
        assert both[1].tell() == max(both[0].tell(), 0)


def test_it_is_a_file() -> None:
    file = opened(sealed((b"0123", b"456789")))
    assert (file.readable(), file.seekable(), file.writable(), file.nbytes) == (True, True, False, 10)
    assert file.seek(-3, os.SEEK_END) == 7
    assert file.read(99) == b"789"
    assert (file.read(1), file.readinto(bytearray())) == (b"", 0)
    assert file.seek(2) == 2
    assert file.seek(1, os.SEEK_CUR) == 3
    buffer = struct.Struct("<i").pack(0)
    words = memoryview(bytearray(buffer)).cast("i")  # any buffer, not only of bytes
    assert file.readinto(words) == 4
    assert words.tobytes() == b"3456"
    with pytest.raises(ValueError, match="no byte -1"):
        file.seek(-1)
    assert BufferedReader(file).read() == b"789"


def test_a_file_that_gives_little_at_a_time_is_read_whole() -> None:
    data = sealed((b"0123", bytes(PIECE + 5)))
    assert unseal(RING, TENANT, SUBJECT, Bytes(data, most=999), len(data)).read() == b"0123" + bytes(PIECE + 5)


def test_closing_closes_the_file_below() -> None:
    data = sealed()
    below = Bytes(data)
    file = unseal(RING, TENANT, SUBJECT, below, len(data))
    assert file.read(1) == b"h"
    file.close()
    file.close()
    assert below.closed
    with pytest.raises(ValueError, match="closed"):
        file.read(1)


def test_a_refused_file_stays_open() -> None:
    below = Bytes(b"KVSHELF\n" * 20)
    with pytest.raises(BlobError):
        unseal(RING, TENANT, SUBJECT, below, 160)
    assert not below.closed


@pytest.mark.parametrize("name", golden_caches())
def test_a_sealed_cache_is_read_as_a_plain_one(name: str, tmp_path: Path) -> None:
    cache = golden_caches()[name]
    packed = cache.pack()
    sealed_parts = seal(RING, TENANT, SUBJECT, packed.parts)
    path = tmp_path / "blob"
    path.write_bytes(b"".join(sealed_parts.buffers))

    def file() -> SealedFile:
        return unseal(RING, TENANT, SUBJECT, FileIO(path), sealed_parts.nbytes)

    with file() as verified:
        assert blob.verify_file(verified, packed.nbytes).root == packed.root  # type: ignore[arg-type]
    body = file()
    arriving = ArrivingCache(blob.open_file(body, packed.nbytes), body, nullcontext)  # type: ignore[arg-type]
    arriving.read()
    require_equal(arriving.cache(), cache)
    with file() as download:
        assert BufferedReader(download).read() == cache.to_bytes()


def test_each_byte_is_read_once_by_whoever_reads_in_order() -> None:
    cache = make_cache(lengths=((20, 9), (40, 40)))
    packed = cache.pack()
    data = sealed([b"".join(part) for part in packed.parts])
    trailer = 40 + 16

    def bytes_read(size: int) -> int:
        file = unseal(RING, TENANT, SUBJECT, below := Bytes(data), len(data))
        blob.open_file(file, packed.nbytes)  # type: ignore[arg-type]
        while file.read(size):
            pass
        return below.count

    whole = max(layer.nbytes for layer in packed.header.layers)
    assert bytes_read(7) == bytes_read(whole) == len(data) + trailer, "the trailer comes first and last"


def test_a_part_is_right_again_after_another_one_was_not() -> None:
    data = bytearray(sealed((b"good", b"bad!")))
    data[-1] ^= 1
    file = opened(bytes(data))
    for _ in range(2):
        file.seek(0)
        assert file.read(1) == b"g"
        assert file.read(1) == b"o"
        file.seek(5)
        with pytest.raises(BlobError, match="part 1"):
            file.read(1)


# Damage


def test_every_flipped_bit_is_noticed() -> None:
    data = sealed()
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises((BlobError, StoreUnavailable)) as error:
            plain(bytes(changed))
        key_id = 12 <= bit // 8 < 20
        assert isinstance(error.value, StoreUnavailable) == key_id, bit
        if bit // 8 >= 20 and not 52 <= bit // 8 < layout(data)[0]:
            assert isinstance(error.value, BlobError)
            assert error.value.reason == "sealed_damaged", bit


@pytest.mark.parametrize("known", [True, False], ids=["size known", "size of the file"])
def test_every_truncation_is_refused_as_such(known: bool) -> None:
    data = sealed()
    for size in range(len(data)):
        with pytest.raises(BlobError) as error:
            unseal(RING, TENANT, SUBJECT, Bytes(data[:size]), len(data) if known else size)
        assert error.value.reason == "truncated", size


def test_a_file_cut_short_while_it_is_read() -> None:
    data = sealed((b"0123", bytes(99)))
    below = Bytes(data)
    file = unseal(RING, TENANT, SUBJECT, below, len(data))
    below.data.truncate(len(data) - 1)
    buffer = bytearray(b"x" * 103)
    with pytest.raises(BlobError) as error:
        file.readinto(buffer)
    assert error.value.reason == "truncated"
    assert buffer == b"0123" + bytes(99)


def test_what_follows_the_end_is_refused() -> None:
    data = sealed()
    assert refusal(data + b"\0") == "trailing_bytes"
    with pytest.raises(BlobError) as error:
        unseal(RING, TENANT, SUBJECT, Bytes(data + b"\0"), len(data))
    assert error.value.reason == "trailing_bytes"


@pytest.mark.parametrize(
    ("offset", "value", "reason"),
    [
        (0, b"KVSHELF\n", "bad_magic"),
        (8, b"\2\0", "newer_major"),
        (8, b"\0\0", "unknown_major"),
        (10, b"\1\0", "field_malformed"),
        (52, bytes(4), "field_malformed"),
        (52, b"\xff" * 4, "header_too_large"),
        (52, (4099).to_bytes(4, "little"), "header_too_large"),
        (52, (4098).to_bytes(4, "little"), "truncated"),
        (52, (3).to_bytes(4, "little"), "trailing_bytes"),
        (56, bytes(8), "field_malformed"),
        (56, b"\xff" * 8, "field_malformed"),
        (56, (2**36).to_bytes(8, "little"), "field_malformed"),
        (56, (2**36 - 32).to_bytes(8, "little"), "truncated"),
        (56, (15).to_bytes(8, "little"), "trailing_bytes"),
        (56, struct.pack("<2Q", 15, 12), "sealed_damaged"),
    ],
)
def test_a_header_that_lies(offset: int, value: bytes, reason: str) -> None:
    data = bytearray(sealed())
    data[offset : offset + len(value)] = value
    assert refusal(bytes(data)) == reason


def test_a_damaged_part_leaves_nothing_in_the_buffer_of_its_reader() -> None:
    data = bytearray(sealed((b"first", b"x" * (2 * PIECE))))
    data[-1] ^= 1
    for most in (1 << 30, 7):
        file = unseal(RING, TENANT, SUBJECT, Bytes(bytes(data), most), len(data))
        assert file.read(5) == b"first"
        buffer = bytearray(b"?" * (2 * PIECE))
        with pytest.raises(BlobError, match="part 1"):
            file.readinto(buffer)
        assert not any(buffer)
        with pytest.raises(BlobError, match="part 1"):
            file.read(1)
        with pytest.raises(BlobError, match="part 1"):
            file.read(1)
        assert file.tell() == 5


def test_an_error_of_the_file_below_leaves_nothing_either() -> None:
    class Failing(Bytes):
        left = 5

        def readinto(self, buffer: memoryview, /) -> int:  # type: ignore[override]
            self.left -= 1
            if not self.left:
                raise OSError("the cable is out")
            return super().readinto(buffer)

    data = sealed((b"x" * (3 * PIECE),))
    buffer = bytearray(b"?" * (3 * PIECE))
    with pytest.raises(OSError, match="cable"):
        unseal(RING, TENANT, SUBJECT, Failing(data), len(data)).readinto(buffer)
    assert not any(buffer)


# Mix-ups


def test_a_blob_opens_under_its_own_name_only() -> None:
    data = sealed()
    assert refusal(data, tenant="acmf") == "sealed_damaged"
    assert refusal(data, subject="kvs_" + "0e" * 20) == "sealed_damaged"
    assert refusal(data, subject="source:" + SUBJECT) == "sealed_damaged"
    joined = sealed(tenant="ab", subject="c")
    assert refusal(joined, tenant="a", subject="bc") == "sealed_damaged"


def test_the_key_of_a_blob_belongs_to_its_tenant() -> None:
    salt = bytes(32)
    keys = {RING.derive(RING.sealing_id, salt, "kvshelf.seal", tenant) for tenant in ("", "a", "b")}
    assert len(keys) == 3


def test_parts_in_another_place_do_not_open() -> None:
    parts = (b"a" * 9, b"b" * 9, b"c" * 9)
    header, mine = split(sealed(parts))
    others = {
        "another blob": split(sealed(parts))[1],
        "another tenant": split(sealed(parts, tenant="b"))[1],
        "another cache": split(sealed(parts, subject="b"))[1],
        "another order": [mine[1], mine[2], mine[0]],
        "one part twice": [mine[0]] * 3,
    }
    for what, theirs in others.items():
        for index in range(3):
            if theirs[index] != mine[index]:
                mixed = [*mine[:index], theirs[index], *mine[index + 1 :]]
                assert refusal(header + b"".join(mixed)) == "sealed_damaged", (what, index)


def test_a_blob_with_a_part_less_does_not_open() -> None:
    header, parts = split(sealed((b"a" * 9, b"b" * 9, b"c" * 9)))
    for left in range(3):
        kept = parts[:left] + parts[left + 1 :]
        shorter = header[:52] + struct.pack("<I2Q", 2, 9, 9) + b"".join(kept)
        assert refusal(shorter) == "sealed_damaged"


# Keys


def test_after_a_rotation_old_blobs_open_and_new_ones_have_the_new_key() -> None:
    old, rotated, gone = Keyring(KEYS[:1]), Keyring([KEYS[1], KEYS[0]]), Keyring(KEYS[1:])
    before, after = sealed(ring=old), sealed(ring=rotated)
    assert (key_id_of(before), key_id_of(after)) == (old.sealing_id, rotated.sealing_id)
    assert rotated.ids == (key_id_of(after), key_id_of(before))
    assert plain(before, ring=rotated) == plain(after, ring=rotated) == plain(after, ring=gone) == b"".join(PARTS)
    with pytest.raises(StoreUnavailable, match=f"key {old.sealing_id}, which the key file does not have") as error:
        plain(before, ring=gone)
    assert error.value.details == {"key_id": old.sealing_id}


def test_a_key_under_the_id_of_another_does_not_open() -> None:
    data, other = sealed(), Keyring(KEYS[1:2])
    taken = data[:12] + bytes.fromhex(other.sealing_id) + data[20:]
    with pytest.raises(BlobError, match="does not open"):
        plain(taken, ring=other)


def key_file(folder: Path, content: bytes | str, mode: int = 0o600) -> Path:
    path = folder / "keys"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    path.chmod(mode)
    return path


def test_a_key_file_holds_keys_in_two_forms_and_comments(tmp_path: Path) -> None:
    lines = ["# since März", "", f"  {KEYS[0].hex()}\r", f"{base64.b64encode(KEYS[1]).decode()} # old"]
    lines.append(bytes(range(170, 202)).hex().upper())
    path = key_file(tmp_path, "\n".join(lines))
    (tmp_path / "link").symlink_to(path)
    for name in (path, str(path), tmp_path / "link"):
        assert Keyring.read(name).ids == Keyring([*KEYS[:2], bytes(range(170, 202))]).ids
    path.chmod(0o400)
    assert Keyring.read(path).sealing_id == RING.sealing_id


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o601, 0o644])
def test_a_key_file_open_to_others_is_refused(mode: int, tmp_path: Path) -> None:
    path = key_file(tmp_path, KEYS[0].hex(), mode)
    with pytest.raises(InvalidRequest, match=f"mode {mode:o}.*chmod 600 {path}") as error:
        Keyring.read(path)
    assert error.value.param == "encryption_key_file"


HEX = KEYS[2].hex()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "has no key"),
        ("# nothing\n\n", "has no key"),
        (f"{HEX}\n\n{HEX[:-1]}", "line 3 is no key"),
        (HEX + "0", "line 1 is no key"),
        (f"{HEX} {HEX}", "line 1 is no key"),
        ("z" * 64, "line 1 is no key"),
        (base64.b64encode(bytes(31)), "line 1 is no key"),
        (base64.b64encode(bytes(33)), "line 1 is no key"),
        (base64.b64encode(KEYS[2])[:-1], "line 1 is no key"),
        (base64.b64encode(KEYS[2])[:20] + b" " + base64.b64encode(KEYS[2])[20:], "line 1 is no key"),
        (b"\xff\xfe" * 40, "line 1 is no key"),
        (f"{HEX}\n{KEYS[1].hex()}\n{base64.b64encode(KEYS[2]).decode()}", "line 3 repeats the key of line 1"),
        ("#" * ((1 << 20) + 1), "more than 1048576 bytes"),
    ],
)
def test_a_malformed_key_file_is_refused_without_a_word_of_it(
    content: str | bytes, problem: str, tmp_path: Path
) -> None:
    path = key_file(tmp_path, content)
    with pytest.raises(InvalidRequest, match=problem) as error:
        Keyring.read(path)
    assert error.value.param == "encryption_key_file"
    assert str(path) in error.value.message
    assert "0303" not in error.value.message
    assert "AwMD" not in error.value.message


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "loop").symlink_to("loop")
    problems = {"missing": "No such file", "pipe": "not a regular file", "": "Is a directory", "loop": "symbolic"}
    for name, problem in problems.items():
        with pytest.raises(InvalidRequest, match=problem) as error:
            Keyring.read(tmp_path / name)
        assert error.value.param == "encryption_key_file"


def test_a_keyring_needs_different_keys_of_32_bytes() -> None:
    for keys in ([], [bytes(31)], [bytes(33)], [KEYS[0], KEYS[0]]):
        with pytest.raises(InvalidRequest) as error:
            Keyring(keys)
        assert error.value.param == "encryption_key_file"


def test_nothing_that_is_shown_tells_a_key() -> None:
    ring = Keyring(KEYS)
    assert repr(ring) == str(ring) == f"Keyring({', '.join(ring.ids)})"
    file = opened(sealed())
    shown = repr([ring, file, file._ciphers, seal(RING, TENANT, SUBJECT, [[memoryview(b"a")]])])
    for key in KEYS:
        assert key.hex() not in shown
        assert repr(key)[2:-1] not in shown


# Memory


MEASURED = """
import sys
from io import FileIO
from kvshelf.artifact.memory import fill, fresh_memory
from kvshelf.store.sealing.keyring import Keyring
from kvshelf.store.sealing import seal, unseal

def peak():  # since the last reset
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))

def reset():
    open("/proc/self/clear_refs", "w").write("5")

MB = 1 << 20
path, ring = sys.argv[1], Keyring([bytes(32)])
data = memoryview(b"x" * (64 * MB))
parts = [[data[: 32 * MB], data[32 * MB :]]] * 4
reset()
before = peak()
sealed = seal(ring, "t", "s", parts)
with open(path, "wb", buffering=0) as file:
    for buffer in sealed.buffers:
        file.write(buffer)
print("seal", (peak() - before) / MB)
del data, parts

buffer = fresh_memory(64 * MB)
buffer[:: 4096] = bytes(64 * 256)
reset()
before = peak()
with unseal(ring, "t", "s", FileIO(path), sealed.nbytes) as file:
    for _ in range(4):
        fill(file, buffer)
print("whole", (peak() - before) / MB)
del buffer

reset()
before = peak()
with unseal(ring, "t", "s", FileIO(path), sealed.nbytes) as file:
    while file.read(MB):
        pass
print("pieces", (peak() - before) / MB)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are measured as Linux tells them")
def test_sealing_takes_no_memory_and_reading_at_most_one_part(tmp_path: Path) -> None:
    """256 MB in four parts, in a process of its own."""
    command = [sys.executable, "-c", MEASURED, str(tmp_path / "sealed")]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    taken = dict(zip(lines[::2], map(float, lines[1::2]), strict=True))
    assert taken["seal"] < 4
    assert taken["whole"] < 4
    assert 60 < taken["pieces"] < 64 + 6


# Rough treatment


def test_random_damage_is_always_refused(soak: bool) -> None:
    cache = make_cache(lengths=((20, 9), (31, 0)))
    data = b"".join(seal(RING, TENANT, SUBJECT, cache.pack().parts).buffers)
    generator = random.Random(5)
    for _ in range(2000 if soak else 200):
        changed = bytearray(data)
        start = generator.randrange(len(data))
        changed[start : start + 9] = generator.randbytes(generator.randrange(12))
        if bytes(changed) != data:
            with pytest.raises((BlobError, StoreUnavailable)):
                plain(bytes(changed))
