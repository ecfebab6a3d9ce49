"""PDF files, honest and hostile, written out by hand: no library would write the second kind."""

from __future__ import annotations

import io
import zlib
from collections.abc import Sequence

from pypdf import PdfReader, PdfWriter

LINE = "The lock keeper counts nineteen barges."


def pdf(*pages: str) -> bytes:
    """A page for each text; line breaks within a text are not shown."""
    return pdf_of([page_content(text) for text in pages])


def page_content(text: str) -> bytes:
    shown = text.replace("\\", "\\\\").replace("(", "\\(").replace(")", "\\)").encode("latin-1")
    return b"BT /F1 12 Tf 72 700 Td (" + shown + b") Tj ET"


def pdf_of(contents: Sequence[bytes], *, filters: str = "", kids: str | None = None, prev: int | None = None) -> bytes:
    """A page for each content stream, which is encoded already. kids: of the page tree, in place of these pages. prev:
    where the table of objects says that an older one is."""
    first = 4
    numbers = [first + 2 * n for n in range(len(contents))]
    tree = kids if kids is not None else " ".join(f"{number} 0 R" for number in numbers)
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Count {len(contents)} /Kids [{tree}] >>".encode(),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>",
    ]
    for number, content in zip(numbers, contents, strict=True):
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Resources << /Font << /F1 3 0 R >> >> "
            f"/Contents {number + 1} 0 R >>".encode()
        )
        objects.append(f"<< /Length {len(content)} {filters} >>\nstream\n".encode() + content + b"\nendstream")
    return _file(objects, prev)


def _file(objects: Sequence[bytes], prev: int | None) -> bytes:
    data = b"%PDF-1.7\n"
    offsets = []
    for number, content in enumerate(objects, 1):
        offsets.append(len(data))
        data += f"{number} 0 obj\n".encode() + content + b"\nendobj\n"
    table = f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n" + "".join(f"{at:010} 00000 n \n" for at in offsets)
    older = f" /Prev {len(data) if prev == -1 else prev}" if prev is not None else ""
    trailer = f"trailer\n<< /Size {len(objects) + 1} /Root 1 0 R{older} >>\nstartxref\n{len(data)}\n%%EOF\n"
    return data + (table + trailer).encode()


def encrypted(data: bytes, password: str) -> bytes:
    writer = PdfWriter(PdfReader(io.BytesIO(data)))
    writer.encrypt(password, "the owner's", algorithm="AES-256")
    out = io.BytesIO()
    writer.write(out)
    return out.getvalue()


def deflated(data: bytes, times: int = 1) -> bytes:
    for _ in range(times):
        data = zlib.compress(data, 6)
    return data


def bomb() -> bytes:
    """A hundred megabytes of spaces in a hundredth of that."""
    data = deflated(b" " * (100 << 20))
    return pdf_of([data], filters="/Filter /FlateDecode")


def nested_bomb() -> bytes:
    """Seventy megabytes in a few hundred bytes: deflated three times."""
    return pdf_of([deflated(b" " * (70 << 20), 3)], filters="/Filter [/FlateDecode /FlateDecode /FlateDecode]")


def laborious(operators: int) -> bytes:
    """A page that draws nothing, many times over."""
    return pdf_of([deflated(b"q Q BT ET " * operators)], filters="/Filter /FlateDecode")


def own_ancestor() -> bytes:
    """A tree of pages in which the root is its own child."""
    return pdf_of([page_content(LINE)], kids="2 0 R " * 3)


def endless_tables() -> bytes:
    """A table of objects whose older version is itself."""
    return pdf_of([page_content(LINE)], prev=-1)
