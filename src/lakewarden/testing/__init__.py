"""What tests and benchmarks of this program, and of programs built on it, need."""
