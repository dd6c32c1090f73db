"""The two ways through a factory, each step in the order in which it happens.

    make:   lock -> define -> build -> push
    prove:  choose -> run -> report -> sign -> attach -> promote

A way does nothing by itself: what a step does, and what it raises, stands in its stage. Who makes an image
does not wait for what proves one to be imported.
"""
