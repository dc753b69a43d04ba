"""Write self-contained HTML pages and trace files. Knows columns, texts and events, not plans; never imports torch."""
