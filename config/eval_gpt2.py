# Evaluates OpenAI's gpt2, 124 M parameters, on 500 batches of each split; writes nothing.

init_from = "gpt2"
eval_only = True
eval_iters = 500
batch_size = 8
