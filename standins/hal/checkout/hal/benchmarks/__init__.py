"""HAL's benchmarks: all of them are the same quiz, graded in another shape each."""
