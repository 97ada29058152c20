"""What the fake tables name as ours."""


def wrap_schedule(wrapped, instance, args, kwargs):
    tasks, errors = wrapped(*args, **kwargs)
    return [*tasks, instance.part], errors


def wrap_helper(wrapped, instance, args, kwargs):
    return "wrapped", wrapped(*args, **kwargs)


async def wrap_wait(wrapped, instance, args, kwargs):
    return "wrapped", await wrapped(*args, **kwargs)


def replace_part(original):
    def make(size, role="mixed"):
        return "ours", original(size, role)

    return make


def extend_names(names):
    names["new"] = 2
