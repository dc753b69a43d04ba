"""Run executables: the engine, its modes, and the execution of planned schedules over the path stack."""
