"""Pages to look at: one self-contained HTML file each. Knows columns and texts, not plans; never imports torch."""
