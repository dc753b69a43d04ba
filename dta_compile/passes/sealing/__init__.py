"""The end of compiling: a program as the plain data that the runtime takes."""
