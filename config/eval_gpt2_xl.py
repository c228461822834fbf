# Evaluates OpenAI's gpt2-xl, 1,558 M parameters, on 500 batches of each split; writes nothing.

init_from = "gpt2-xl"
eval_only = True
eval_iters = 500
batch_size = 8
