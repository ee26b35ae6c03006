"""Activation checkpointing: where saved inputs are kept, and how a layer is run again in backward.

In:  calls of zero.checkpoint or torch.utils.checkpoint, and the section activation_checkpointing.
Out: the function's outputs; in backward its inputs again, from device memory, host memory, files or other ranks.
Called by: zero.checkpointing and zero.optimizer.

    torch.utils.checkpoint   runs the function without its activations, and again in backward, with the same random
                             numbers and autocast
    Call                     one such call: its inputs, however nested, become a list of tensors that are saved
    Checkpointer             stores each of these tensors until then:

        in place | a part on each tensor-parallel rank  ->  on the device | in host memory | in files
                                                            allocated one by one, or in one arena

Source: "ZeRO" (arXiv:1910.02054), the section on ZeRO-R; Chen et al. (arXiv:1604.06174).
"""
