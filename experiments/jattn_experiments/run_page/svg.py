"""Figures as SVG: tooltips in the file, and the page's element in the page's font and colours."""

import re
from xml.etree import ElementTree

from matplotlib.colors import to_hex

from jattn_experiments.run_page.style import FAINT, INK, PALETTE, RAMP, STYLE

SVG, LINK = "http://www.w3.org/2000/svg", "{http://www.w3.org/1999/xlink}href"
SHADES = [to_hex(RAMP(level)) for level in range(RAMP.N)]
NAMES = {  # names in the page's style sheet for the figures' colours
    **{"#ffffff": "page", INK: "ink", "#000000": "ink", FAINT: "soft"},
    **{STYLE["axes.edgecolor"]: "soft", STYLE["grid.color"]: "rule"},
    **{colour.lower(): f"c{index}" for index, colour in enumerate(PALETTE)},
    **{colour: f"s{level}" for level, colour in enumerate(SHADES)},
}
VARIABLES = {colour: f"var(--{name})" for colour, name in NAMES.items()}
TARGET = re.compile(r"#([\w.-]+)")  # what a link or a clip path refers to
KEPT = "steps"  # begins the names that the page's script looks for


def shades() -> str:
    """The variables ``--s0``, ``--s1``, ...: colours between the stops ``--r0`` to ``--r4`` of the page."""
    mixed = []
    for level in range(RAMP.N):
        low, share = divmod(4 * level / (RAMP.N - 1), 1)
        mixed.append(f"--s{level}: color-mix(in srgb, var(--r{min(low + 1, 4):.0f}) {share:.1%}, var(--r{low:.0f}));")
    return " ".join(mixed)


def with_tooltips(svg: bytes) -> bytes:
    """Turns links into tooltips. Matplotlib writes no text for a mark except its url, as a link around it."""
    return re.sub(rb'<a xlink:href="([^"]*)"[^>]*>', rb"<g><title>\1</title>", svg).replace(b"</a>", b"</g>")


def inline(svg: str, name: str) -> str:
    """The element for the page, which the heading ``name-title`` names.

    Its ids begin with ``name``, so that figures do not use each other's shapes.
    """
    root = ElementTree.fromstring(svg)
    for parent in list(root.iter()):
        for child in list(parent):
            background = child.get("style") == "fill: #ffffff"
            if background or child.tag in (
                f"{{{SVG}}}metadata",
                f"{{{SVG}}}style",
            ):  # that style would apply to the page
                parent.remove(child)
    styles = {f"#{element.get('id')}": element.get("style") for element in root.iter()}
    used = {target for element in root.iter() for value in element.attrib.values() for target in TARGET.findall(value)}
    for element in root.iter():
        if element.get("id", "") not in used and not element.get("id", "").startswith(KEPT):
            element.attrib.pop("id", None)
        if element.get("transform", "").startswith("rotate(-0 "):
            del element.attrib["transform"]
        if LINK in element.attrib and styles.get(element.attrib[LINK]) == element.get("style"):
            element.attrib.pop("style", None)  # the shape has it
        dressed = {"href" if key == LINK else key: _dressed(key, value, name) for key, value in element.items()}
        element.attrib.clear()
        element.attrib.update(dressed)
        element.text, element.tail = (text if text and text.strip() else None for text in (element.text, element.tail))
    del root.attrib["width"], root.attrib["height"]
    width = float(
        root.attrib["viewBox"].split()[2]
    )  # in points; text has 7 to 10 points, which is 10 to 14 pixels at most
    root.attrib |= {"role": "img", "aria-labelledby": f"{name}-title", "style": f"max-width: {1.4 * width:g}px"}
    ElementTree.register_namespace("", SVG)
    text = ElementTree.tostring(root, encoding="unicode").replace(" />", "/>")
    alone = r"<g>(<(\w+)[^<>]*(?:/>|>[^<]*</\2>))</g>"  # a group of one element: half of the page's groups
    return re.sub(alone, r"\1", text)


def _dressed(key: str, value: str, name: str) -> str:
    """The value of an attribute as the page needs it."""
    if key == "id":
        return f"{name}-{value}"
    if key in ("d", "x", "y"):  # a tenth of a point is invisible, and many digits make a large page
        value = re.sub(r"\d+\.\d+", lambda number: f"{float(number[0]):.1f}".removesuffix(".0"), value)
        return re.sub(r"\s*([A-Zz])\s*", r"\1", value).strip()
    if key == "style":
        value = re.sub(r"font-family: [^;]*(; |$)", "", value).replace(": ", ":").replace("; ", ";")
        return re.sub("#[0-9a-f]{6}", lambda colour: VARIABLES.get(colour[0], colour[0]), value)
    return TARGET.sub(rf"#{name}-\1", value)
