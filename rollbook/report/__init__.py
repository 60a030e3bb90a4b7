"""`rollbook report`: one self-contained HTML page about a run; hand-written SVG, no library."""
