"""Write files of trace viewers: Chrome's trace format and speedscope's. Knows events, not plans."""
