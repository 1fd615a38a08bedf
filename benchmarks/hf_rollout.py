"""transformers: `generate`, with log-probs from the stored logits."""

import os

import generation
import torch
import torch_model
import workloads


def main():
    args = generation.arguments()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    ready_s, net = generation.timed(torch_model.build, args.work.model)
    net.eval()
    net.generation_config.eos_token_id = None  # Only these end a sample.

    @torch.no_grad()
    def sample(prompts, samples, max_tokens, stop, temperature, seed):
        torch.manual_seed(seed)
        width = max(map(len, prompts))
        ids = torch.full((len(prompts), width), workloads.PAD)
        mask = torch.zeros_like(ids)
        for i, prompt in enumerate(prompts):
            ids[i, width - len(prompt) :] = torch.tensor(prompt)
            mask[i, width - len(prompt) :] = 1
        sampling = {"temperature": temperature, "top_k": 0, "top_p": 1.0}
        out = net.generate(
            ids,
            attention_mask=mask,
            do_sample=temperature > 0,
            **(sampling if temperature > 0 else {}),
            num_return_sequences=samples,
            max_new_tokens=max_tokens,
            eos_token_id=stop or None,
            pad_token_id=workloads.PAD,
            return_dict_in_generate=True,
            output_logits=True,
        )
        new = out.sequences[:, width:]
        # At temperature 0 the log-probs are those of temperature 1.
        logps = [
            logits.log_softmax(-1).gather(-1, new[:, t, None])
            for t, logits in enumerate(out.logits)
        ]
        logps = torch.cat(logps, 1).tolist()
        stop = set(stop)
        rows = [generation.cut(row, stop) for row in new.tolist()]
        return [
            (row, values[: len(row)])
            for row, values in zip(rows, logps, strict=True)
        ]

    generation.measure(
        args, sample, ("torch", "transformers"), ready_s=ready_s
    )


if __name__ == "__main__":
    main()
