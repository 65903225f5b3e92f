"""A figure loses bytes, and nothing that is seen; what users call things stays text."""

from xml.etree import ElementTree

from coral_lens.report.figures.compact import compacted

SVG = """<?xml version="1.0"?>
<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" viewBox="0 0 9 9">
 <metadata>made by</metadata>
 <defs><style type="text/css">*{stroke-linejoin: round}</style></defs>
 <g id="figure_1">
  <g id="axes_1" clip-path="url(#longname)">
   <path id="longname" d="M 1.23456 2 L 3.5 -4 z " style="fill: none; stroke: #fff"/>
   <use xlink:href="#longname" x="0.98765" style="fill: none; stroke: #fff"/>
  </g>
  <!-- a label -->
  <text transform="rotate(-0 1 2)" style="font-family: 'DejaVu Sans'">id="longname" url(#longname) a &gt; 1.23456</text>
 </g>
</svg>"""


def test_a_drawing_worked_by_hand() -> None:
    svg = compacted(SVG, prefix="f")
    drawing = ElementTree.fromstring(svg)
    space = "{http://www.w3.org/2000/svg}"
    assert [e.tag.removeprefix(space) for e in drawing.iter()] == ["svg", "style", "defs", "g", "path", "use", "text"]
    (path,) = drawing.iter(f"{space}path")
    assert path.attrib == {"id": "f0", "d": "M1.23 2L3.5 -4z", "class": "fs0"}
    (use,) = drawing.iter(f"{space}use")
    assert use.attrib == {"{http://www.w3.org/1999/xlink}href": "#f0", "x": "0.98", "class": "fs0"}
    assert next(drawing.iter(f"{space}g")).attrib == {"clip-path": "url(#f0)"}
    (rules,) = drawing.iter(f"{space}style")
    assert rules.text == ".fs0{fill:none;stroke:#fff}.fs1{font-family:'DejaVu Sans',Verdana,sans-serif}"


def test_text_is_never_edited() -> None:
    text = next(ElementTree.fromstring(compacted(SVG, prefix="f")).iter("{http://www.w3.org/2000/svg}text"))
    assert text.text == 'id="longname" url(#longname) a > 1.23456'
    assert "transform" not in text.attrib
