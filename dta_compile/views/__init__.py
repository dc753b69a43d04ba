"""Show plans as self-contained HTML pages. Never imports torch."""
