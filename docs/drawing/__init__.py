"""Renders the Mermaid diagrams of the pages as SVG: the site needs no script and no network.

`parse` reads the part of Mermaid that the pages use, `layout` places nodes and edges, `svg` writes
the drawing.
"""
