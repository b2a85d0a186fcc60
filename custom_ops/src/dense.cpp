#include "dense.h"

#include <utility>

namespace gr {

Dense::Dense(const Argument& argument) : tensor_(argument.tensor()), data_(tensor_.data) {
    if (argument.contiguous())
        return;
    std::int64_t count = 1;
    for (std::int32_t d = tensor_.rank - 1; d >= 0; count *= tensor_.shape[d], --d)
        shape_.add(tensor_.shape[d], argument.stride(d), count);
    data_ = copy_.emplace(static_cast<std::size_t>(count * dtype_bytes(tensor_.dtype))).data();
}

void Dense::load(const Threads& threads) const {
    if (copy_)
        copy_elements(tensor_.data, data_, dtype_bytes(tensor_.dtype), shape_, threads);
}

void Dense::store(const Threads& threads) const {
    if (!copy_)
        return;
    CopyShape back;
    for (int d = 0; d < shape_.rank; ++d)
        back.add(shape_.size[d], shape_.to[d], shape_.from[d]);
    copy_elements(data_, tensor_.data, dtype_bytes(tensor_.dtype), back, threads);
}

} // namespace gr
