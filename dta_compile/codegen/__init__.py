"""Generated code for pieces of graphs: inductor's, kept on disk, made in calls or in a process in the background."""
