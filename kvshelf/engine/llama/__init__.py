"""llama.cpp as the engine of questions: kvshelf makes caches, and llama.cpp computes the passes behind them."""
