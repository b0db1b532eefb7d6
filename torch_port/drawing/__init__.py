"""Charts as SVG: `svg` draws lines, `style` gives them colours, `text` writes their numbers."""
