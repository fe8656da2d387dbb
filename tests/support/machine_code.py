"""What a compiled kernel asks of a GPU's cores: its registers, and instructions per element."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest


def tool(name: str, *args: str) -> str:
    """What one of CUDA's programs says, which come with triton."""
    nvidia = pytest.importorskip("triton.backends.nvidia")
    path = Path(nvidia.__file__).parent / "bin" / name
    if not path.exists():
        pytest.skip(f"this triton comes without {name}")
    return subprocess.run([path, *args], capture_output=True, text=True, check=True).stdout


def registers(cubin: Path) -> int:
    """Registers per thread."""
    found = re.search(r"REG:(\d+)", tool("cuobjdump", "-res-usage", str(cubin)))
    assert found is not None
    return int(found[1])


def shortest_path(cubin: Path) -> int:
    """Instructions of the shortest way through a kernel that makes all accesses of 16 bytes.

    Whole blocks of a tensor are read and written so. What else is on the way is done for each of
    them; what is jumped over is for the ends of tensors, and for blocks of several rows.
    """
    blocks: list[tuple[str, list[str]]] = [("", [])]
    for line in tool("nvdisasm", "-c", str(cubin)).splitlines():
        if label := re.match(r"^(\.L\w+):", line):
            blocks.append((label[1], []))
        elif instruction := re.match(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            blocks[-1][1].append(instruction[1])
            if re.search(r"\b(BRA|EXIT|RET)\b", instruction[1]):
                blocks.append(("", []))
    place = {label: k for k, (label, _) in enumerate(blocks) if label}
    wide = {k for k, (_, own) in enumerate(blocks) if any(".128" in line for line in own)}
    lengths: list[int] = []

    def follow(k: int, length: int, seen: frozenset[int]) -> None:
        own = blocks[k][1]
        length, seen = length + len(own), seen | {k}
        last = own[-1] if own else ""
        always = not last.startswith("@") and "BRA P" not in last and "BRA !P" not in last
        if "EXIT" in last and wide <= seen:
            lengths.append(length)
        if target := re.search(r"BRA.*`\((\.L\w+)\)", last):
            if place[target[1]] not in seen:
                follow(place[target[1]], length, seen)
        if k + 1 < len(blocks) and not (always and re.search(r"\b(BRA|EXIT|RET)\b", last)):
            follow(k + 1, length, seen)

    follow(0, 0, frozenset())
    return min(lengths)
