"""The end of compiling: a `Program` becomes an `Executable`, the plain data that the runtime takes."""
