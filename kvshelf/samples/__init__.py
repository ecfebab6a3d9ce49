"""Documents with facts and questions, made of word lists: for lessons, demonstrations and benchmarks."""
