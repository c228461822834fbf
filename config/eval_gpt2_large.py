# Evaluates OpenAI's gpt2-large, 774 M parameters, on 500 batches of each split; writes nothing.

init_from = "gpt2-large"
eval_only = True
eval_iters = 500
batch_size = 8
