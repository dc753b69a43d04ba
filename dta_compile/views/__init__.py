"""Show plans as self-contained HTML pages and as text. Never imports torch."""
